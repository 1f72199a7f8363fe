/* A vocabulary file writes bytes as printable characters ("Ġthe" for " the"). That map is undone
 * here, once; nothing after this file knows it.
 *
 * The file may be hostile or merely broken, so everything that later code takes for granted is
 * established here: sizes fit 32 bits, no token is empty, no two ordinary tokens are the same bytes,
 * and every byte that text cannot do without has a token. */
#include "engine/text/tokens.h"

enum {
    TOKENS_MAX = 1 << 21, /* eight times the largest vocabulary known */
    MAP_END = 0x144,      /* code points that stand for a byte are below */
    BLOB_MAX = 256 * 1024 * 1024
};

/* Code point -> byte, or -1. Printable Latin-1 stands for itself, the other 68 bytes are counted
 * from U+0100 on. */
static int mapped_byte(uint32_t cp)
{
    if ((cp >= 0x21 && cp <= 0x7e) || (cp >= 0xa1 && cp <= 0xff && cp != 0xad))
        return (int)cp;
    if (cp < 0x100 || cp >= MAP_END)
        return -1;
    uint32_t k = cp - 0x100;
    if (k < 0x21)
        return (int)k;
    return k < 0x21 + 34 ? (int)(0x7f + k - 0x21) : 0xad;
}

size_t tokens_unmap(struct text_view name, char *out)
{
    size_t n = 0;
    for (size_t i = 0; i < name.len; i++) {
        unsigned char u = (unsigned char)name.p[i];
        uint32_t cp = u;
        if (u >= 0xc2 && u <= 0xdf && i + 1 < name.len)
            cp = (uint32_t)(u & 0x1f) << 6 | ((unsigned char)name.p[++i] & 0x3f);
        else if (u >= 0x80)
            cp = MAP_END;
        int byte = mapped_byte(cp);
        if (byte < 0) {
            memcpy(out, name.p, name.len);
            return name.len;
        }
        out[n++] = (char)byte;
    }
    return n;
}

/* The slot that holds these bytes, or the empty one where they would go. */
static struct tokens_slot *slot_of(const struct tokens *v, struct text_view bytes)
{
    uint32_t hash = (uint32_t)tokens_hash(bytes.p, bytes.len);
    for (uint32_t at = hash & v->mask;; at = (at + 1) & v->mask) {
        struct tokens_slot *s = &v->slots[at];
        if (s->id == TOKEN_NONE)
            return s;
        struct text_view have = tokens_bytes(v, s->id);
        if (s->hash == hash && have.len == bytes.len && !memcmp(have.p, bytes.p, bytes.len))
            return s;
    }
}

uint32_t tokens_find(const struct tokens *v, struct text_view bytes)
{
    return slot_of(v, bytes)->id;
}

static status read_tokens(struct tokens *v, const struct tokenizer_source *src, size_t names_bytes)
{
    uint32_t at = 0, name_at = (uint32_t)names_bytes; /* bytes first: never more than the names */
    for (uint32_t i = 0; i < v->n; i++) {
        struct text_view name = src->token(src->ctx, i);
        int32_t type = src->type(src->ctx, i);
        if (type < TOKEN_NORMAL || type > TOKEN_BYTE)
            return err(ERR_FORMAT, "token %u: unknown token type %d", i, (int)type);
        v->types[i] = (uint8_t)type;
        v->bytes_at[i] = at;
        v->name_at[i] = name_at;
        memcpy(v->blob + name_at, name.p, name.len);
        name_at += (uint32_t)name.len;
        if (tokens_is_control(v, i) || type == TOKEN_USER_DEFINED) {
            memcpy(v->blob + at, name.p, name.len); /* written as they are */
            at += (uint32_t)name.len;
        } else {
            at += (uint32_t)tokens_unmap(name, v->blob + at);
        }
    }
    v->bytes_at[v->n] = at;
    v->name_at[v->n] = name_at;
    return OK;
}

/* User-defined tokens come second and give way: they are found before text is cut into pieces, and
 * some files list them beside an ordinary token of the same bytes. */
static status fill_slots(struct tokens *v)
{
    for (int user_defined = 0; user_defined < 2; user_defined++) {
        for (uint32_t i = 0; i < v->n; i++) {
            if (tokens_is_control(v, i) || (v->types[i] == TOKEN_USER_DEFINED) != user_defined)
                continue;
            struct text_view bytes = tokens_bytes(v, i);
            struct tokens_slot *s = slot_of(v, bytes);
            if (s->id != TOKEN_NONE && user_defined)
                continue;
            if (s->id != TOKEN_NONE)
                return err(ERR_FORMAT, "tokens %u and %u are the same", s->id, i);
            *s = (struct tokens_slot){(uint32_t)tokens_hash(bytes.p, bytes.len), i};
        }
    }
    return OK;
}

/* Real vocabularies lack bytes that their training text did not have: SmolLM2 has no token for six
 * control characters and for planes 4 to 11, and the reference drops those. But a vocabulary that
 * cannot write ASCII or the planes in use would lose what people write. */
static status find_bytes(struct tokens *v)
{
    for (int b = 0; b < 256; b++) {
        char c = (char)b;
        uint32_t id = v->byte_ids[b] = tokens_find(v, (struct text_view){&c, 1});
        bool needed = b == '\t' || b == '\n' || b == '\r' || (b >= 0x20 && b <= 0x7e) ||
                      (b >= 0x80 && b <= 0xbf) || (b >= 0xc2 && b <= 0xf0);
        if (id == TOKEN_NONE && needed)
            return err(ERR_FORMAT, "no token for byte 0x%02x: not a byte-level vocabulary", b);
    }
    return OK;
}

static status measure(const struct tokenizer_source *src, size_t *bytes)
{
    *bytes = 0;
    if (src->n_tokens == 0 || src->n_tokens > TOKENS_MAX)
        return err(ERR_FORMAT, "%u tokens; 1 to %d can be read", src->n_tokens, TOKENS_MAX);
    for (uint32_t i = 0; i < src->n_tokens; i++) {
        size_t len = src->token(src->ctx, i).len;
        if (len == 0)
            return err(ERR_FORMAT, "token %u is empty", i);
        if (len > BLOB_MAX - *bytes)
            return err(ERR_FORMAT, "the tokens take more than %d bytes", BLOB_MAX);
        *bytes += len;
    }
    return OK;
}

status tokens_init(struct tokens *v, const struct tokenizer_source *src)
{
    size_t bytes;
    *v = (struct tokens){.n = src->n_tokens};
    TRY(measure(src, &bytes));
    uint32_t n_slots = 512;
    while (n_slots < 2 * v->n)
        n_slots *= 2;
    v->mask = n_slots - 1;
    v->blob = mem_alloc(2 * bytes);
    v->bytes_at = mem_alloc(((size_t)v->n + 1) * sizeof *v->bytes_at);
    v->name_at = mem_alloc(((size_t)v->n + 1) * sizeof *v->name_at);
    v->types = mem_alloc(v->n);
    v->slots = mem_alloc(n_slots * sizeof *v->slots);
    memset(v->slots, 0xff, n_slots * sizeof *v->slots); /* TOKEN_NONE */
    status st = read_tokens(v, src, bytes);
    if (st == OK)
        st = fill_slots(v);
    if (st == OK)
        st = find_bytes(v);
    if (st != OK)
        tokens_fini(v);
    return st;
}

void tokens_fini(struct tokens *v)
{
    mem_free(v->blob);
    mem_free(v->bytes_at);
    mem_free(v->name_at);
    mem_free(v->types);
    mem_free(v->slots);
    *v = (struct tokens){0};
}
