/* Any bytes as the body of each endpoint, under both strictnesses. What is accepted must be inside
 * every bound that the engine relies on; what is refused must say so in valid JSON. */
#include "api/request_fields.h"
#include "tests/catalog_rig.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <string.h>

static struct engine_info info;
static struct request_rules rules;
static struct token_scratch *scratch;
static const char *const names[] = {"m"};
static struct catalog catalog;

/* error.c can answer, too; nothing here does. */
void exchange_reply(struct exchange *x, const struct reply *r)
{
    (void)x;
    (void)r;
}

static void set_up_catalog(void)
{
    const struct kv_geometry geo = {
        .block_rows = 16, .layers = 2, .kv_heads = 3, .head_dim = 64, .page_bytes = 4096};
    const struct catalog_wish w = {.plugin = "wave", .budget = 0.1, .top_p = 1, .interval = 1};
    struct sparse_choice c;
    uint32_t offered;
    CHECK(catalog_choose(&w, &c, &offered) == OK);
    CHECK(catalog_make(&catalog, &rig_plans, &geo, &c, 100, offered) == OK);
}

static void set_up(void)
{
    struct tokenizer *t;
    set_up_catalog();
    CHECK(tokenizer_create_bytes(&t) == OK);
    info = (struct engine_info){.tokenizer = t,
                                .chat = chat_template_chatml(),
                                .vocab = 259,
                                .max_model_len = 4096,
                                .catalog = &catalog};
    rules = (struct request_rules){.info = &info,
                                   .names = names,
                                   .n_names = 1,
                                   .max_n = 8,
                                   .max_logprobs = 20,
                                   .default_temperature = (double)NAN,
                                   .default_top_p = (double)NAN};
    scratch = token_scratch_create();
}

static void check_params(const struct request *r)
{
    const struct sample_params *p = &r->params;
    CHECK(p->temperature >= 0 && p->temperature <= 2 && p->top_p > 0 && p->top_p <= 1);
    CHECK(p->min_p >= 0 && p->min_p <= 1 && p->top_k < info.vocab);
    CHECK(p->repetition_penalty > 0 && isfinite(p->repetition_penalty));
    CHECK(fabsf(p->presence_penalty) <= 2 && fabsf(p->frequency_penalty) <= 2);
    CHECK(r->n >= 1 && r->n <= rules.max_n && r->n_prompts >= 1 && r->n_prompts <= MAX_PROMPTS);
    CHECK(r->top_logprobs >= -1 && r->top_logprobs <= 20 && r->prompt_logprobs <= 20);
    CHECK(r->n_stops <= MAX_STOPS && r->n_stop_ids <= MAX_STOP_IDS && r->n_bias <= MAX_BIAS);
    CHECK(catalog_check(&catalog, &r->sparse) == OK && r->sparse_min_context <= INT32_MAX);
    CHECK(r->model != NULL && r->min_tokens <= r->max_tokens);
    for (uint32_t i = 0; i < r->n_stops; i++)
        CHECK(r->stops[i].len >= 1 && r->stops[i].len <= MAX_STOP_BYTES);
    for (uint32_t i = 0; i < r->n_stop_ids; i++)
        CHECK(r->stop_ids[i] < info.vocab);
    for (uint32_t i = 0; i < r->n_bias; i++)
        CHECK(r->bias_ids[i] < info.vocab && fabsf(r->bias[i]) <= 100);
}

static void check_prompts(const struct request *r, bool generates)
{
    for (uint32_t i = 0; i < r->n_prompts; i++) {
        const struct request_prompt *p = &r->prompts[i];
        for (uint32_t k = 0; k < p->n_ids; k++)
            CHECK(p->ids[k] < info.vocab);
        if (!generates)
            continue;
        CHECK(p->n_ids >= 1 && p->n_ids < info.max_model_len);
        CHECK(request_room(r, &rules, i) + p->n_ids <= info.max_model_len);
    }
}

static void check_error(const struct api_error *e)
{
    char text[4096];
    size_t len = error_render(e, text, sizeof text);
    CHECK(len < sizeof text);
    text[len] = '\0';
    cJSON *tree = cJSON_Parse(text);
    CHECK(tree != NULL && (e->status == 400 || e->status == 404 || e->status == 413));
    cJSON_Delete(tree);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    static const enum body_kind kinds[] = {BODY_COMPLETION, BODY_CHAT, BODY_TOKENIZE,
                                           BODY_DETOKENIZE};
    if (scratch == NULL)
        set_up();
    char *copy = mem_alloc(len + 1);
    memcpy(copy, data, len);
    rules.strict_fields = len % 2;
    rules.reject_overflow = len % 3 == 0;
    for (size_t i = 0; i < ARRAY_LEN(kinds); i++) {
        struct request *r = NULL;
        struct api_error e = {0};
        bool generates = kinds[i] == BODY_COMPLETION || kinds[i] == BODY_CHAT;
        status st =
            request_parse_as(&r, kinds[i], &rules, scratch, (struct text_view){copy, len}, 1, &e);
        if (st != OK) {
            check_error(&e);
            continue;
        }
        if (generates)
            check_params(r);
        check_prompts(r, generates);
        request_free(r);
    }
    mem_free(copy);
    return 0;
}
