/* What /metrics says per tenant: our own names only, because a label more would split every sum over
 * vllm:*. Labels are names of the file, never a client's words. Loop thread. */
#ifndef API_METRICS_TENANTS_H
#define API_METRICS_TENANTS_H

#include "api/histogram.h"
#include "api/quota.h"

enum {
    TENANT_CODES = 6,
    TENANT_REASONS = QUOTA_LIMITS + 1
}; /* the last reason: the server's own */

struct tenant_counts {
    uint64_t answers[TENANT_CODES]; /* by the first digit of the status */
    uint64_t rejected[TENANT_REASONS];
    uint64_t prompt_tokens, output_tokens;
    struct histogram ttft;
};

void metrics_tenants_init(struct tenant_counts *c);

struct roster;
void metrics_tenants_render(const struct roster *ro, struct writer *w);

#endif
