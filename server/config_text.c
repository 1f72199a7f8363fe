/* What config knows, as text: --help, --print-config and the line of non-default values. */
#include <stdio.h>
#include <string.h>

#include "server/config.h"

static const struct {
    const char *name, *title;
} groups[] = {
    {"model", "Model"},
    {"engine", "Engine"},
    {"kv", "KV cache"},
    {"sparse", "Sparse attention"},
    {"server", "Server"},
    {"security", "Security"},
    {"api", "API"},
    {"limits", "Limits"},
    {"mock", "Mock device (for tests)"},
};

static void wrap(const char *text, int indent, int width)
{
    int column = indent;
    printf("%*s", indent, "");
    while (*text != '\0') {
        int n = (int)strcspn(text, " ");
        if (column > indent && column + 1 + n > width) {
            printf("\n%*s", indent, "");
            column = indent;
        }
        column += printf("%s%.*s", column > indent ? " " : "", n, text);
        text += n + (text[n] == ' ');
    }
    putchar('\n');
}

static void print_option(const struct option *o)
{
    static const char *const kinds[] = {"",        " N",    " SIZE",   " SECONDS",
                                        " NUMBER", " TEXT", " TEXT..."};
    printf("  --%s%s", o->name, o->choices != NULL ? " " : kinds[o->type]);
    if (o->choices != NULL)
        printf("%s", o->choices);
    for (const char *p = o->aliases; p != NULL && *p != '\0';) {
        size_t n = strcspn(p, ", ");
        printf(", %s%.*s", n == 1 || strncmp(p, "np", n) == 0 ? "-" : "--", (int)n, p);
        p += n + strspn(p + n, ", ");
    }
    if (o->preset != NULL)
        printf("  [%s]", o->preset);
    if (o->env != NULL)
        printf("  env %s", o->env);
    putchar('\n');
    wrap(o->help, 6, 96);
}

static bool mentions(const struct option *o, const char *word)
{
    return strstr(o->name, word) != NULL || strstr(o->help, word) != NULL;
}

void config_print_help(const struct config *cfg)
{
    const char *only = cfg->help_group;
    bool is_group = false;
    for (size_t g = 0; only != NULL && g < ARRAY_LEN(groups); g++)
        is_group = is_group || strcmp(groups[g].name, only) == 0;
    if (only != NULL && strcmp(only, "all") == 0)
        only = NULL;
    printf("spind serve [MODEL] [options]    serves MODEL (a GGUF file) over the OpenAI API\n"
           "spind serve CONFIG.json --load-format dummy    the same with made-up weights\n\n"
           "--name VALUE or --name=VALUE; - and _ are the same in names; switches also as "
           "--no-NAME.\nNumbers: 32k = 32000, 32K = 32768. Order: flag, environment, --config "
           "file, default.\n--help=GROUP shows one group (");
    for (size_t g = 0; g < ARRAY_LEN(groups); g++)
        printf("%s%s", g == 0 ? "" : ", ", groups[g].name);
    printf("), --help=WORD what mentions it.\n--print-config writes the options as a JSON file, "
           "each explained.\n");
    for (size_t g = 0; g < ARRAY_LEN(groups); g++) {
        bool titled = false;
        for (uint32_t i = 0; i < options_count; i++) {
            const struct option *o = &options_table[i];
            if (strcmp(o->group, groups[g].name) != 0 ||
                (only != NULL && strcmp(only, o->group) != 0 && (is_group || !mentions(o, only))))
                continue;
            if (!titled)
                printf("\n%s (%s)\n", groups[g].title, groups[g].name);
            titled = true;
            print_option(o);
        }
    }
}

static void print_json_text(const char *s)
{
    putchar('"');
    for (; *s != '\0'; s++) {
        if (*s == '"' || *s == '\\')
            putchar('\\');
        if ((unsigned char)*s < 0x20)
            printf("\\u%04x", (unsigned)*s);
        else
            putchar(*s);
    }
    putchar('"');
}

static void print_json_value(const struct config *cfg, const struct option *o)
{
    char text[4096];
    if (o->type == OPTION_LIST) {
        const struct option_list *l = (const void *)((const char *)cfg + o->offset);
        putchar('[');
        for (uint32_t i = 0; i < l->n; i++) {
            printf("%s", i == 0 ? "" : ", ");
            print_json_text(o->flags & OPTION_SECRET ? "***" : l->v[i]);
        }
        putchar(']');
        return;
    }
    options_text(o, cfg, text, sizeof text);
    bool bare = o->type == OPTION_FLAG || (o->type != OPTION_TEXT && strcmp(text, "auto") != 0);
    if (o->type == OPTION_TEXT && text[0] == '\0')
        printf("null");
    else if (bare)
        printf("%s", text);
    else
        print_json_text(text);
}

void config_print(const struct config *cfg)
{
    char note[1024];
    printf("{\n  \"//\": ");
    print_json_text(
        "Every option of spind with its value. \"//name\" explains the key that follows "
        "it. Flags and environment win over this file.");
    for (size_t g = 0; g < ARRAY_LEN(groups); g++)
        for (uint32_t i = 0; i < options_count; i++) {
            const struct option *o = &options_table[i];
            if (strcmp(o->group, groups[g].name) != 0 || (o->flags & OPTION_FLAG_ONLY))
                continue;
            snprintf(note, sizeof note, "%s%s%s%s", o->help, o->choices == NULL ? "" : " One of ",
                     o->choices == NULL ? "" : o->choices, o->choices == NULL ? "" : ".");
            printf(",\n\n  \"//%s\": ", o->name);
            print_json_text(note);
            printf(",\n  \"%s\": ", o->name);
            print_json_value(cfg, o);
        }
    printf("\n}\n");
}

static const char *const sources[] = {"", " (file)", " (environment)", ""};

void config_print_changes(const struct config *cfg, const char *indent)
{
    char text[4096];
    for (uint32_t i = 0; i < options_count; i++) {
        if (cfg->from[i] == CONFIG_DEFAULT)
            continue;
        options_text(&options_table[i], cfg, text, sizeof text);
        printf("%s%s = %s%s\n", indent, options_table[i].name, text, sources[cfg->from[i]]);
    }
}

void config_describe(const struct config *cfg, char *out, size_t room)
{
    char text[512];
    size_t at = 0;
    out[0] = '\0';
    for (uint32_t i = 0; i < options_count && at < room; i++) {
        if (cfg->from[i] == CONFIG_DEFAULT)
            continue;
        options_text(&options_table[i], cfg, text, sizeof text);
        at += (size_t)snprintf(out + at, room - at, "%s%s=%s%s", at == 0 ? "" : ", ",
                               options_table[i].name, text, sources[cfg->from[i]]);
    }
}
