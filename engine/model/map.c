/* Read-only mappings and the SIGBUS handler that repairs them (map.h says why). Any thread. */
#include "engine/model/map.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_MAPS = 64 }; /* parts of a split model are open together */

static const size_t MAX_FILE = (size_t)1 << 47; /* the address space of a process */

/* What the handler may read at any moment, hence atomics. A slot is taken while len > 0. */
static struct {
    atomic_size_t len;
    atomic_uintptr_t base; /* 0: taken, not mapped yet */
    atomic_bool torn;
} maps[MAX_MAPS];

static struct sigaction previous;
static uintptr_t page_bytes; /* set before the handler is there */

static void repair(int signal, siginfo_t *info, void *context)
{
    (void)signal, (void)context;
    int saved = errno;
    uintptr_t at = (uintptr_t)info->si_addr;
    char *page = (char *)info->si_addr - (at & (page_bytes - 1));
    for (int i = 0; i < MAX_MAPS; i++) {
        uintptr_t base = atomic_load(&maps[i].base);
        if (base == 0 || at < base || at - base >= atomic_load(&maps[i].len))
            continue;
        /* A plain system call on Linux, so safe in a handler. */
        void *got = mmap(page, page_bytes, PROT_READ,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
        if (got == MAP_FAILED)
            break;
        atomic_store(&maps[i].torn, true);
        errno = saved;
        return;
    }
    /* Not ours: the access is tried again and meets whoever was here before. */
    sigaction(SIGBUS, &previous, NULL);
    errno = saved;
}

static void install_handler(void)
{
    static atomic_flag installed = ATOMIC_FLAG_INIT;
    if (atomic_flag_test_and_set(&installed))
        return;
    page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    struct sigaction act = {.sa_sigaction = repair, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigemptyset(&act.sa_mask);
    sigaction(SIGBUS, &act, &previous);
}

static int take_slot(size_t len)
{
    for (int i = 0; i < MAX_MAPS; i++) {
        size_t none = 0;
        if (atomic_compare_exchange_strong(&maps[i].len, &none, len))
            return i;
    }
    return -1;
}

static void give_slot(int slot)
{
    atomic_store(&maps[slot].base, 0);
    atomic_store(&maps[slot].torn, false);
    atomic_store(&maps[slot].len, 0); /* last: from here on it may be taken */
}

static status map_fd(struct map *m, int fd, const char *path, size_t min_bytes)
{
    struct stat s;
    if (fstat(fd, &s) != 0)
        return err(ERR_IO, "%s: %s", path, strerror(errno));
    if (!S_ISREG(s.st_mode))
        return err(ERR_FORMAT, "%s: not a regular file", path);
    size_t len = (size_t)s.st_size;
    if (len < min_bytes || len >= MAX_FILE)
        return err(ERR_FORMAT, "%s: offset 0: the file has %zu bytes, allowed are %zu to 2^47 - 1",
                   path, len, min_bytes);
    *m = (struct map){.len = len, .slot = take_slot(len)};
    if (m->slot < 0)
        return err(ERR_FULL, "%s: %d files are mapped already", path, (int)MAX_MAPS);
    void *p = mmap(NULL, len, PROT_READ, MAP_PRIVATE, fd, 0);
    if (p == MAP_FAILED) {
        give_slot(m->slot);
        return err(ERR_IO, "%s: mmap: %s", path, strerror(errno));
    }
    madvise(p, len, MADV_WILLNEED); /* starts reading what is not in the page cache */
    m->p = p;
    atomic_store(&maps[m->slot].base, (uintptr_t)p);
    return OK;
}

status map_open(struct map *m, const char *path, size_t min_bytes)
{
    install_handler();
    /* Symbolic links are followed: caches of models are made of them. NONBLOCK: a FIFO in the place
     * of the file is refused, not waited for. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return err(ERR_IO, "%s: %s", path, strerror(errno));
    status st = map_fd(m, fd, path, min_bytes);
    close(fd); /* the mapping outlives the descriptor */
    return st;
}

void map_close(struct map *m)
{
    if (m->p == NULL)
        return;
    munmap(m->p, m->len);
    give_slot(m->slot);
    *m = (struct map){0};
}

bool map_torn(const struct map *m)
{
    return m->p != NULL && atomic_load(&maps[m->slot].torn);
}
