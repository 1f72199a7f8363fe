/* The pieces of docs/quality.md. Beside our numbers stand those that reference/selection.md measured
 * with `transformers`: the same algorithm should be near. */
#include "engine/tool/quality.h"

#include <stdio.h>

const double quality_budgets[QUALITY_BUDGETS] = {0.02, 0.05, 0.1, 0.25};

const struct quality_piece quality_pieces[] = {
    {.name = "kl-8",
     .title = "KL to dense, pages of 8 rows",
     .text =
         "`wave` with its presets is the quality setting: a centroid and a few bits of every "
         "row. `codes=off` has the centroid alone, `outliers` the farthest rows beside it. "
         "`oracle` knows the true mass of each partition: of wave's clusters, or of pages of "
         "consecutive rows. Digest bytes: of all layers, without mean V, all of which a step scans "
         "unless it goes from coarse to fine.",
     .kind = QUALITY_KL,
     .block_rows = 8,
     .context = 7232,
     .n_budgets = 4,
     .count = 192,
     .lines = {{"dense", "", {0}, NULL},
               {"wave", "", {0}, "wave, 8 rows: quality"},
               {"wave", "coarse_group=4,coarse_open=0.25", {0}, NULL},
               {"wave", "top_p=0.9", {0}, NULL},
               {"wave", "estimate=0", {0}, NULL},
               {"wave", "codes=off,outliers=0", {0.040, 0.0150}, NULL},
               {"wave", "outliers=1", {0.023, 0.0104}, "farthest row, 8 rows"},
               {"wave", "outliers=2", {0.0165}, NULL},
               {"wave", "outliers=1,coarse_group=4,coarse_open=0.5", {0.0226}, NULL},
               {"wave", "outliers=1,coarse_group=4,coarse_open=0.25", {0.0242}, NULL},
               {"oracle", "layout=wave,estimate=0.25", {0.0126}, "oracle, clusters of 8"},
               {"oracle", "layout=wave", {0}, NULL},
               {"oracle", "", {0}, NULL},
               {"quest", "", {0}, "quest, 8 rows"}}},
    {.name = "kl-16",
     .title = "KL to dense, pages of 16 rows",
     .text = "`wave` with its presets is the speed setting: a centroid alone. `balance=off` is the "
             "paper's free k-means, in segments. `interval=n` selects in every n-th step only.",
     .kind = QUALITY_KL,
     .block_rows = 16,
     .context = 7232,
     .n_budgets = 4,
     .count = 192,
     .lines = {{"wave", "", {0.038, 0.016, 0.0066}, "wave, 16 rows: speed"},
               {"wave", "codes=on", {0}, NULL},
               {"wave", "outliers=1", {0.060, 0.0194}, NULL},
               {"wave", "outliers=2", {0, 0.0179}, NULL},
               {"wave", "estimate=0", {0}, NULL},
               {"wave", "estimate=1", {0}, NULL},
               {"wave", "reduce=sum_prob", {0}, NULL},
               {"wave", "coarse_group=8,coarse_open=0.5", {0, 0.0168}, NULL},
               {"wave", "coarse_group=4,coarse_open=0.25", {0, 0.0183}, NULL},
               {"wave", "interval=2", {0, 0.041}, NULL},
               {"wave", "interval=4", {0, 0.092}, NULL},
               {"wave", "balance=off", {0.034, 0.015, 0.0070}, "free k-means"},
               {"wave", "balance=off,estimate=0", {0.059, 0.023, 0.0095}, NULL},
               {"oracle", "layout=wave,estimate=0.25", {0.021}, NULL},
               {"oracle", "", {0, 0.028, 0.012}, "oracle, pages of 16"},
               {"quest", "", {0.149, 0.075, 0.044}, "quest, 16 rows"}}},
    {.name = "kl-fp8",
     .title = "KL of fp8 pages to dense rows over bf16 pages",
     .text =
         "`--kv-cache-dtype fp8`: rows are rounded to e4m3 when they are written, without a scale. "
         "`dense` is what the rounding costs alone. Nearly all of it comes from K: three bits of "
         "fraction of its few large channels.",
     .kind = QUALITY_KL,
     .kv_type = KV_E4M3,
     .block_rows = 8,
     .context = 7232,
     .n_budgets = 3,
     .count = 192,
     .lines = {{"dense", "", {0}, NULL}, {"wave", "", {0}, NULL}, {"quest", "", {0}, NULL}}},
    {.name = "kl-places",
     .title = "KL at other places of the text",
     .text = "The same with another 7,232 tokens. How far places differ is how far one number can "
             "be trusted.",
     .kind = QUALITY_PLACES,
     .block_rows = 8,
     .context = 7232,
     .n_budgets = 3,
     .count = 192,
     .lines = {{"wave", "", {0}, NULL},
               {"wave", "outliers=1", {0}, NULL},
               {"oracle", "layout=wave,estimate=0.25", {0}, NULL},
               {"quest", "", {0}, NULL}}},
    {.name = "kl-contexts",
     .title = "KL by length of the context",
     .text =
         "Beyond the model's 8,192 positions RoPE is scaled (NTK-aware, --rope-scale 2); whether "
         "the model holds there is seen from the perplexity of dense.",
     .kind = QUALITY_CONTEXTS,
     .block_rows = 8,
     .n_budgets = 3,
     .count = 192,
     .lines = {{"wave", "", {0}, NULL},
               {"oracle", "layout=wave,estimate=0.25", {0}, NULL},
               {"quest", "", {0}, NULL}}},
    {.name = "policies",
     .title = "Head policies",
     .text = "KL is to dense attention without a policy, so the harm of the policy itself counts; "
             "pass keys of 7,200 tokens. `streaming` makes every lane a STREAM lane (sinks and a "
             "window); `razor` keeps the lanes that `spind calibrate` finds. `duo` needs a pattern "
             "file, and nobody has published one for this model.",
     .kind = QUALITY_POLICIES,
     .block_rows = 8,
     .context = 7232,
     .n_budgets = 2,
     .count = 4,
     .lines = {{"dense", "", {0}, NULL}, {"wave", "", {0}, NULL}, {"quest", "", {0}, NULL}}},
    {.name = "passkey-8",
     .title = "Pass keys, pages of 8 rows",
     .text =
         "A pass key in 7,200 tokens, one prompt for each depth. Depths in the last 1,056 "
         "positions are in the tail: every method keeps them. In brackets selection.md: kept of "
         "six prompts of 7,360 tokens.",
     .kind = QUALITY_PASSKEY,
     .block_rows = 8,
     .context = 7200,
     .n_budgets = 4,
     .count = 32,
     .lines = {{"wave", "", {0}, "wave, 8 rows: quality"},
               {"wave", "coarse_group=4,coarse_open=0.25", {0}, NULL},
               {"wave", "codes=off,outliers=0", {0, 4}, NULL},
               {"wave", "outliers=1", {5, 5}, "farthest row, 8 rows"},
               {"oracle", "layout=wave,estimate=0.25", {0}, "oracle, clusters of 8"},
               {"quest", "", {0}, "quest, 8 rows"}}},
    {.name = "passkey-16",
     .title = "Pass keys, pages of 16 rows",
     .text = "The same with six depths.",
     .kind = QUALITY_PASSKEY,
     .block_rows = 16,
     .context = 7200,
     .n_budgets = 4,
     .count = 6,
     .lines = {{"wave", "", {2, 2}, "wave, 16 rows: speed"},
               {"wave", "codes=on", {0}, NULL},
               {"wave", "outliers=1", {2, 4}, NULL},
               {"wave", "outliers=2", {0, 5}, NULL},
               {"wave", "balance=off", {4, 5}, "free k-means"},
               {"oracle", "", {0}, NULL},
               {"quest", "", {0, 1}, "quest, 16 rows"}}},
    {.name = "ruler-8",
     .title = "RULER's tasks in completion form, pages of 8 rows",
     .text = "How many of the asked answers dense finds, and how many of those are kept; log p is "
             "that of the true answer per token. A task that dense cannot do at this size says "
             "nothing but its log p.",
     .kind = QUALITY_RULER,
     .block_rows = 8,
     .context = 7200,
     .n_budgets = 4,
     .count = 1,
     .lines = {{"wave", "", {0}, NULL}, {"quest", "", {0}, NULL}}},
    {.name = "turns-8",
     .title = "Five questions in a row, pages of 8 rows",
     .text = "One context of 7,200 tokens with five pass keys; the answers stay in the history.",
     .kind = QUALITY_TURNS,
     .block_rows = 8,
     .context = 7200,
     .n_budgets = 4,
     .count = 3,
     .lines = {{"wave", "", {0}, NULL},
               {"oracle", "layout=wave,estimate=0.25", {0}, NULL},
               {"quest", "", {0}, NULL}}},
    {.name = "robustness-8",
     .title = "Robustness of the selection, pages of 8 rows",
     .text = "A query is (row, layer, KV head). recall@K: the share of its K heaviest rows that is "
             "attended exactly; R-0.9@64: the share of the queries with a recall of 0.9 at least; "
             "mass: the share of the candidates' attention. Rows of a page come along, so "
             "recall@256 cannot be 1 at 2 %.",
     .kind = QUALITY_ROBUSTNESS,
     .block_rows = 8,
     .context = 7232,
     .n_budgets = 3,
     .count = 32,
     .lines = {{"wave", "", {0}, NULL},
               {"wave", "outliers=1", {0}, NULL},
               {"oracle", "layout=wave", {0}, NULL},
               {"quest", "", {0}, NULL}}},
    {.name = "planted-8",
     .title = "Planted traces to 128K, 2 % budget, pages of 8 rows",
     .text =
         "Keys and queries without a model: 16 planted tokens hold 80 % of each query's "
         "attention. Each trace is made to break one kind of algorithm (engine/tool/planted.h); "
         "in `flat` nothing is planted. p5: the recall that 95 % of the queries reach.",
     .kind = QUALITY_PLANTED,
     .block_rows = 8,
     .count = 32},
};

const uint32_t quality_n_pieces = ARRAY_LEN(quality_pieces);

void quality_label(const struct quality_line *l, char *out, size_t room)
{
    snprintf(out, room, "%s%s%s", l->plugin, *l->options ? " " : "", l->options);
}
