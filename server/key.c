/* `spind key [TENANT]`. The key goes to stdout and nowhere else: what the file keeps cannot be turned
 * back into it. */
#include "server/key.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#include "api/new_key.h"
#include "api/tenants.h"

int key_run(int argc, char **argv, const struct outside *out)
{
    unsigned char random[NEW_KEY_RANDOM];
    struct new_key k;
    (void)out;
    if (argc > 1 || (argc == 1 && !tenants_is_name(argv[0]))) {
        fprintf(stderr, "spind key [TENANT]: a tenant's name is 1 to %d of a-z, 0-9, _ and -\n",
                TENANT_NAME_MAX);
        return EXIT_USAGE;
    }
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random) {
        fprintf(stderr, "spind key: no randomness from the system: %s\n", strerror(errno));
        return EXIT_FAILED;
    }
    new_key_make(&k, random);
    printf("The key, for the client; it is not shown again:\n\n    %s\n\n", k.text);
    if (argc == 1)
        printf("For the file of --tenants (more keys of \"%s\" go into the same list):\n\n"
               "    {\"name\": \"%s\", \"keys\": [{\"id\": \"%s\", \"sha256\": \"%s\"}]}\n",
               argv[0], argv[0], k.id, k.sha256);
    else
        printf("For a tenant's \"keys\" in the file of --tenants:\n\n"
               "    {\"id\": \"%s\", \"sha256\": \"%s\"}\n",
               k.id, k.sha256);
    explicit_bzero(random, sizeof random);
    explicit_bzero(&k, sizeof k);
    return EXIT_OK;
}
