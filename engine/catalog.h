/* What sparse attention this process offers (sparse/plugin.h): the plug-ins, what a request gets that
 * does not say, and what fits the model and the memory of the process.
 *
 * catalog_choose and catalog_make run before anything is served; from then on a catalog is constant,
 * and the loop thread reads it to validate requests. */
#ifndef ENGINE_CATALOG_H
#define ENGINE_CATALOG_H

#include "sparse/plugin.h"

/* What the operator wrote, by the names of the flags. Texts are borrowed. */
struct catalog_wish {
    const char *plugin;         /* --sparse */
    const char *const *options; /* [n_options] --sparse-option "name=value" */
    const char *const *files;   /* [n_files] --plugin */
    const char *const *offers;  /* [n_offers] --sparse-offer: names, or "all"; none: CATALOG_AUTO */
    uint32_t n_options, n_files, n_offers;
    double budget, top_p, miss_threshold;
    uint32_t interval, min_rows;
};

/* Plug-ins, by bits: 1 << index in the registry. A request may name any whose digests have room in a
 * record; these are the ones, beside the server's own, that records are made large enough for. */
enum { CATALOG_AUTO = 0, CATALOG_ALL = (1 << SPARSE_MAX_PLUGINS) - 1 };

/* Loads the shared objects and reads the choice and what is offered. ERR_ARG: the text names the flag
 * and what is allowed. Once per process, before any thread starts. */
status catalog_choose(const struct catalog_wish *w, struct sparse_choice *out, uint32_t *offered);

struct catalog {
    struct sparse_choice preset; /* of requests that do not say */
    uint32_t min_context;        /* prompts with fewer tokens attend everything */
    struct kv_geometry geo;      /* lanes: NULL */
    const char *device;
    bool host_memory; /* plug-ins may read the backend's memory */
    size_t (*digest_bytes)(const struct kv_geometry *geo, const struct digest_desc *d);
    size_t record_lane_bytes; /* of the largest digest that a request may ask for: that of the
                                 preset, or of what is offered with its presets */
};

/* offered: CATALOG_AUTO is the server's own plug-in alone where digests take a device's memory from KV, and
 * all where their memory is the machine's, untouched until it is used, or the server has no plug-in of its
 * own. ERR_ARG: the preset does not fit the model or the device. */
status catalog_make(struct catalog *c, const struct backend *be, const struct kv_geometry *geo,
                    const struct sparse_choice *preset, uint32_t min_context, uint32_t offered);
/* May this be asked of this process? ERR_ARG with a text for the client. */
status catalog_check(const struct catalog *c, const struct sparse_choice *choice);
/* Which plug-ins requests may name, and for which there is no room: a line for the log at start and for `spind
 * inspect`. */
void catalog_tell(const struct catalog *c, void (*line)(void *arg, const char *text), void *arg);
/* Attends everything. */
struct sparse_choice catalog_dense(void);

#endif
