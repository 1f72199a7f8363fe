/* Any bytes as a file of a head policy: accepted only if every lane gets a class, refused with a text
 * that names the file. The bytes lie in memory under a name, because files are what is read. */
#include "sparse/head_policy.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { LAYERS = 2, HEADS = 3 };

static void read_as(const char *policy, const char *file)
{
    const struct head_policy_config c = {.name = policy, .file = file, .sparsity = -1};
    uint8_t classes[LAYERS * HEADS];
    uint32_t sinks, recent;
    memset(classes, 99, sizeof classes);
    if (head_policy_make(&c, LAYERS, HEADS, classes, &sinks, &recent) != OK) {
        CHECK(strncmp(err_text(), "/proc/self/fd/", 14) == 0);
        return;
    }
    CHECK(sinks % 16 == 0 && recent % 16 == 0 && recent > 0);
    for (size_t i = 0; i < sizeof classes; i++)
        CHECK(classes[i] == LANE_SPARSE || classes[i] == LANE_STREAM);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    static int fd = -1;
    char file[64];
    if (fd < 0)
        fd = memfd_create("policy", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, 0) == 0 && pwrite(fd, data, len, 0) == (ssize_t)len);
    snprintf(file, sizeof file, "/proc/self/fd/%d", fd);
    read_as("duo", file);
    read_as("razor", file);
    return 0;
}
