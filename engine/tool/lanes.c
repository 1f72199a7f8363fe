#include "engine/tool/lanes.h"

#include <string.h>

struct lanes_list {
    uint32_t *first; /* [n_steps + 1] once there is a step */
    uint32_t *pages;
    uint32_t n_steps, n_pages, max_steps, max_pages;
};

static uint32_t lists_of(const struct lanes *l)
{
    return l->header.layers * l->header.kv_heads;
}

static struct lanes_sequence *find_sequence(struct lanes *l, uint32_t file, uint64_t id)
{
    for (uint32_t i = l->n_sequences; i-- > 0;) /* the newest is the likeliest */
        if (l->sequences[i].file == file && l->sequences[i].id == id)
            return &l->sequences[i];
    size_t old = l->n_sequences * sizeof *l->sequences;
    l->sequences = mem_grow(l->sequences, old, old + sizeof *l->sequences);
    struct lanes_sequence *s = &l->sequences[l->n_sequences++];
    *s = (struct lanes_sequence){.id = id, .file = file};
    s->lists = mem_alloc(lists_of(l) * sizeof *s->lists);
    return s;
}

static uint32_t *grown(uint32_t *p, uint32_t *max, uint32_t need)
{
    if (need <= *max)
        return p;
    uint32_t more = need > 2 * *max ? need : 2 * *max;
    p = mem_grow(p, *max * sizeof *p, more * sizeof *p);
    *max = more;
    return p;
}

static void add(struct lanes_list *t, const struct trace_record *r)
{
    t->first = grown(t->first, &t->max_steps, t->n_steps + 2);
    t->pages = grown(t->pages, &t->max_pages, t->n_pages + r->n_pages);
    if (r->n_pages > 0)
        memcpy(t->pages + t->n_pages, r->pages, r->n_pages * sizeof *r->pages);
    t->n_pages += r->n_pages;
    t->first[++t->n_steps] = t->n_pages;
}

static status take_header(struct lanes *l, const struct trace_header *h, const char *name,
                          bool first)
{
    if (first)
        l->header = *h;
    const struct trace_header *w = &l->header;
    if (h->layers != w->layers || h->kv_heads != w->kv_heads || h->block_rows != w->block_rows)
        return err(
            ERR_ARG, "%s: %u x %u lanes and pages of %u rows; the first trace has %u x %u and %u",
            name, h->layers, h->kv_heads, h->block_rows, w->layers, w->kv_heads, w->block_rows);
    return OK;
}

static status load_file(struct lanes *l, const char *name, uint32_t file)
{
    struct trace_reader *r;
    TRY(trace_open(&r, name));
    status st = take_header(l, trace_header(r), name, file == 0);
    bool more = st == OK;
    while (more) {
        struct trace_record got;
        st = trace_next(r, &got, &more);
        if (st != OK || !more)
            break;
        struct lanes_sequence *s = find_sequence(l, file, got.sequence);
        add(&s->lists[got.layer * l->header.kv_heads + got.head], &got);
    }
    l->n_cut += trace_cut(r);
    trace_close(r);
    return st;
}

status lanes_load(struct lanes **out, const char *const *files, uint32_t n)
{
    struct lanes *l = mem_alloc(sizeof *l);
    for (uint32_t i = 0; i < n; i++) {
        status st = load_file(l, files[i], i);
        if (st != OK) {
            lanes_free(l);
            return st;
        }
    }
    *out = l;
    return OK;
}

void lanes_free(struct lanes *l)
{
    if (l == NULL)
        return;
    for (uint32_t i = 0; i < l->n_sequences; i++) {
        for (uint32_t k = 0; k < lists_of(l); k++) {
            mem_free(l->sequences[i].lists[k].first);
            mem_free(l->sequences[i].lists[k].pages);
        }
        mem_free(l->sequences[i].lists);
    }
    mem_free(l->sequences);
    mem_free(l);
}

struct replay_lane lanes_get(const struct lanes *l, uint32_t sequence, uint32_t layer,
                             uint32_t head)
{
    const struct lanes_list *t = &l->sequences[sequence].lists[layer * l->header.kv_heads + head];
    return (struct replay_lane){t->n_steps, t->first, t->pages};
}
