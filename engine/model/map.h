/* A file as read-only memory that survives being cut short.
 *
 * Weights are read once, while they are packed, so a mapping costs no second copy, for a 100 MB file
 * as for a 100 GB one. Its danger is SIGBUS: whoever truncates the file (a download that starts over,
 * a full disk) would kill the daemon, in whichever thread touches the page. Jumping out of a worker of
 * the backend is not possible, so the handler repairs instead: it puts a page of zeros where the file
 * ended and notes it. Everybody reads on, and the loader asks map_torn() before it trusts the result.
 *
 * What steers anything (lengths, offsets, names) is copied before it is checked (gguf.c); what changes
 * in the mapping afterwards can give wrong numbers, never a wild address. */
#ifndef ENGINE_MODEL_MAP_H
#define ENGINE_MODEL_MAP_H

#include "kernels/base.h"

struct map {
    unsigned char *p; /* only to be read */
    size_t len;
    int slot; /* of the table that the signal handler reads */
};

/* A regular file of min_bytes or more. ERR_IO: cannot be opened; ERR_FORMAT: too small or too large;
 * ERR_FULL: too many at once. */
status map_open(struct map *m, const char *path, size_t min_bytes);
void map_close(struct map *m);
/* The file ended before its length at map_open: what was read there is zeros. */
bool map_torn(const struct map *m);

#endif
