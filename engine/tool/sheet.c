#include "engine/tool/sheet.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_FILE = 64 << 20 };

const char *sheet_machine(void)
{
    static char name[160];
    char line[256], *model = NULL;
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f != NULL && model == NULL && fgets(line, sizeof line, f) != NULL)
        if (strncmp(line, "model name", 10) == 0 && (model = strchr(line, ':')) != NULL)
            model += 2;
    if (f != NULL)
        fclose(f);
    if (model != NULL)
        model[strcspn(model, "\n")] = '\0';
    snprintf(name, sizeof name, "%.100s, %ld cores", model ? model : "an unnamed processor",
             sysconf(_SC_NPROCESSORS_ONLN));
    return name;
}

cJSON *sheet_create(const char *what)
{
    char date[32];
    time_t now = time(NULL);
    struct tm tm;
    gmtime_r(&now, &tm);
    strftime(date, sizeof date, "%Y-%m-%d", &tm);
    cJSON *s = cJSON_CreateObject();
    cJSON_AddStringToObject(s, "what", what);
    cJSON_AddStringToObject(s, "machine", sheet_machine());
    cJSON_AddStringToObject(s, "date", date);
    cJSON_AddArrayToObject(s, "rows");
    return s;
}

cJSON *sheet_row(cJSON *sheet)
{
    cJSON *row = cJSON_CreateObject();
    cJSON_AddItemToArray(cJSON_GetObjectItem(sheet, "rows"), row);
    return row;
}

double sheet_number(const cJSON *row, const char *key)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(row, key);
    return cJSON_IsNumber(v) ? v->valuedouble : (double)NAN;
}

const char *sheet_text(const cJSON *row, const char *key)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(row, key);
    return cJSON_IsString(v) ? v->valuestring : "";
}

void sheet_cell(char out[SHEET_CELL], const cJSON *row, const struct sheet_column *c)
{
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(row, c->key);
    if (cJSON_IsString(v))
        snprintf(out, SHEET_CELL, "%s", v->valuestring);
    else if (!cJSON_IsNumber(v))
        snprintf(out, SHEET_CELL, "-");
    else if (c->format == SHEET_PERCENT)
        snprintf(out, SHEET_CELL, "%.*f %%", c->digits, 100 * v->valuedouble);
    else
        snprintf(out, SHEET_CELL, "%.*f", c->format == SHEET_COUNT ? 0 : c->digits, v->valuedouble);
}

void sheet_print(FILE *to, const cJSON *rows, const struct sheet_column *columns, uint32_t n)
{
    char text[SHEET_CELL];
    int *width = mem_alloc(n * sizeof *width);
    const cJSON *row;
    for (uint32_t i = 0; i < n; i++) {
        width[i] = (int)strlen(columns[i].title);
        cJSON_ArrayForEach(row, rows)
        {
            sheet_cell(text, row, &columns[i]);
            width[i] = (int)strlen(text) > width[i] ? (int)strlen(text) : width[i];
        }
    }
    for (uint32_t i = 0; i < n; i++)
        fprintf(to, "%s%*s", i ? "  " : "", columns[i].format == SHEET_TEXT ? -width[i] : width[i],
                columns[i].title);
    fputc('\n', to);
    cJSON_ArrayForEach(row, rows)
    {
        for (uint32_t i = 0; i < n; i++) {
            sheet_cell(text, row, &columns[i]);
            fprintf(to, "%s%*s", i ? "  " : "",
                    columns[i].format == SHEET_TEXT ? -width[i] : width[i], text);
        }
        fputc('\n', to);
    }
    fflush(to);
    mem_free(width);
}

void sheet_markdown(FILE *to, const cJSON *rows, const struct sheet_column *columns, uint32_t n)
{
    char text[SHEET_CELL];
    const cJSON *row;
    for (uint32_t i = 0; i < n; i++)
        fprintf(to, "| %s ", columns[i].title);
    fputs("|\n", to);
    for (uint32_t i = 0; i < n; i++)
        fputs(columns[i].format == SHEET_TEXT ? "|---" : "|---:", to);
    fputs("|\n", to);
    cJSON_ArrayForEach(row, rows)
    {
        for (uint32_t i = 0; i < n; i++) {
            sheet_cell(text, row, &columns[i]);
            fprintf(to, "| %s ", text);
        }
        fputs("|\n", to);
    }
}

status sheet_save(const cJSON *sheet, const char *file)
{
    if (file == NULL)
        return OK;
    status st = OK;
    char beside[4096];
    snprintf(beside, sizeof beside, "%s.part", file);
    char *text = cJSON_Print(sheet);
    FILE *f = fopen(beside, "w");
    if (f == NULL) {
        st = err(ERR_IO, "%s: %s", beside, strerror(errno));
        goto out;
    }
    fprintf(f, "%s\n", text);
    if (fclose(f) != 0 || rename(beside, file) != 0)
        st = err(ERR_IO, "%s: %s", file, strerror(errno));
out:
    free(text);
    return st;
}

status sheet_load(cJSON **out, const char *file)
{
    *out = NULL;
    FILE *f = fopen(file, "r");
    if (f == NULL)
        return err(ERR_IO, "%s: %s", file, strerror(errno));
    size_t room = 1 << 16, n = 0, got;
    char *text = mem_alloc(room);
    while ((got = fread(text + n, 1, room - n - 1, f)) > 0 && n < MAX_FILE) {
        n += got;
        if (n + 1 == room) {
            text = mem_grow(text, room, 2 * room);
            room *= 2;
        }
    }
    fclose(f);
    text[n] = '\0';
    *out = cJSON_Parse(text);
    mem_free(text);
    return *out ? OK : err(ERR_FORMAT, "%s is not JSON", file);
}
