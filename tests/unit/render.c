/* api/render.c: the shapes of api.md 2.6, 2.9 and 2.10 that calls do not show by themselves. */
#include "api/render.h"
#include "tests/tap.h"

#include <math.h>

void exchange_reply(struct exchange *x, const struct reply *r) /* error.c would like one */
{
    (void)x;
    (void)r;
}

struct page {
    struct request r;
    struct request_prompt prompt;
    struct tokenizer *tok;
    struct render v;
    struct text_out out;
    struct writer w;
};

static void open_page(struct page *p, enum request_kind kind)
{
    static const uint32_t ids[] = {97, 98};
    memset(p, 0, sizeof *p);
    CHECK(tokenizer_create_bytes(&p->tok) == OK);
    p->prompt = (struct request_prompt){.ids = ids, .n_ids = 2};
    p->r = (struct request){.kind = kind,
                            .model = "a \"model\"",
                            .prompts = &p->prompt,
                            .n_prompts = 1,
                            .n = 1,
                            .top_logprobs = -1,
                            .prompt_logprobs = -1};
    text_out_init(&p->out, NULL, false, true);
    writer_init(&p->w);
}

static void begin(struct page *p)
{
    render_init(&p->v, &p->r, p->tok, "0f", 17, "b1-00000000");
}

static void close_page(struct page *p)
{
    render_fini(&p->v);
    text_out_fini(&p->out);
    writer_fini(&p->w);
    tokenizer_destroy(p->tok);
}

static void say(struct page *p, uint32_t token, float logprob, uint32_t n_top,
                const struct sample_top *top)
{
    struct text_piece piece = {.id = token,
                               .bytes = render_token_bytes(p->tok, token),
                               .scored = true,
                               .rank = 1,
                               .logprob = logprob,
                               .n_top = n_top,
                               .top = top};
    text_out_push(&p->out, &piece);
}

static void has(const struct page *p, const char *want, const char *name)
{
    if (!ok(strstr(p->w.p, want) != NULL, "%s", name))
        printf("# got:\n# %s\n# want in it:\n# %s\n", p->w.p, want);
}

static void whole(struct page *p, enum finish_kind kind, const struct text_tokens *scores)
{
    struct render_choice c = {
        .finish = {.kind = kind, .stop_id = TOKEN_NONE}, .prompt = &p->prompt, .scores = scores};
    struct usage u = {.prompt = 40, .completion = 2, .cached = 32};
    struct render_at at = {0}, end = {0};
    struct writer piece;
    text_out_end(&p->out);
    c.part = text_out_part(&p->out, SIZE_MAX);
    render_answer_begin(&p->v, &p->w);
    CHECK(render_answer_choice(&p->v, &p->w, &c, &at, SIZE_MAX));
    CHECK(render_answer_end(&p->v, &p->w, &c, &u, &end, SIZE_MAX));
    /* The same in stretches of some bytes. */
    at = end = (struct render_at){0};
    writer_init(&piece);
    render_answer_begin(&p->v, &piece);
    for (size_t most = piece.len; !render_answer_choice(&p->v, &piece, &c, &at, most);)
        most = piece.len + 1;
    for (size_t most = 1; !render_answer_end(&p->v, &piece, &c, &u, &end, most);)
        most = piece.len + 1;
    CHECK(strcmp(piece.p, p->w.p) == 0);
    writer_fini(&piece);
}

static void whole_chat_answers_have_every_key(void)
{
    struct page p;
    open_page(&p, REQUEST_CHAT);
    begin(&p);
    say(&p, 'H', 0, 0, NULL);
    say(&p, 'i', 0, 0, NULL);
    whole(&p, FINISH_STOP, NULL);
    has(&p,
        "{\"id\":\"chatcmpl-0f\",\"object\":\"chat.completion\",\"created\":17,\"model\":"
        "\"a \\\"model\\\"\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\","
        "\"content\":\"Hi\",\"refusal\":null},\"logprobs\":null,\"finish_reason\":\"stop\","
        "\"stop_reason\":null}],\"usage\":{\"prompt_tokens\":40,\"completion_tokens\":2,"
        "\"total_tokens\":42,\"prompt_tokens_details\":{\"cached_tokens\":32}},"
        "\"system_fingerprint\":\"b1-00000000\",\"service_tier\":null}",
        "the chat answer of api.md 2.9, with cached tokens");
    close_page(&p);
}

static void chat_logprobs_carry_bytes(void)
{
    static const struct sample_top top[] = {{0xe6, -0.1f}, {'"', -2.5f}};
    struct page p;
    open_page(&p, REQUEST_CHAT);
    p.r.logprobs = true;
    begin(&p);
    say(&p, 0xe6, -0.1f, 2, top);
    whole(&p, FINISH_LENGTH, NULL);
    has(&p,
        "\"logprobs\":{\"content\":[{\"token\":\"\xef\xbf\xbd\",\"logprob\":-0.100000001,"
        "\"bytes\":[230],\"top_logprobs\":[{\"token\":\"\xef\xbf\xbd\",\"logprob\":-0.100000001,"
        "\"bytes\":[230]},{\"token\":\"\\\"\",\"logprob\":-2.5,\"bytes\":[34]}]}],"
        "\"refusal\":null}",
        "half a character shows as U+FFFD and as its bytes");
    close_page(&p);
    open_page(&p, REQUEST_CHAT);
    p.r.logprobs = true;
    begin(&p);
    say(&p, 'a', -INFINITY, 0, NULL);
    whole(&p, FINISH_LENGTH, NULL);
    has(&p, "\"logprob\":-9999.0,\"bytes\":[97],\"top_logprobs\":[]}",
        "minus infinity is -9999.0, and no alternatives are an empty list");
    close_page(&p);
}

static void completion_logprobs_merge_equal_texts(void)
{
    /* Two half characters look the same; the sampled token is among its alternatives. */
    static const struct sample_top top[] = {{0xe6, -0.5f}, {0xe7, -0.75f}, {'a', -1.0f}};
    struct page p;
    open_page(&p, REQUEST_COMPLETION);
    p.r.logprobs = true;
    begin(&p);
    say(&p, 'a', -1.0000001f, 3, top);
    say(&p, 'b', -3.0f, 0, NULL);
    whole(&p, FINISH_LENGTH, NULL);
    has(&p,
        "\"logprobs\":{\"text_offset\":[0,1],\"token_logprobs\":[-1.0,-3.0],"
        "\"tokens\":[\"a\",\"b\"],\"top_logprobs\":[{\"\xef\xbf\xbd\":-0.5,\"a\":-1.0},"
        "{\"b\":-3.0}]}",
        "the larger of equal texts stays, and a token has one number in both places");
    close_page(&p);
    open_page(&p, REQUEST_COMPLETION);
    p.r.logprobs = p.r.token_ids_as_text = true;
    begin(&p);
    say(&p, 'a', -1.0f, 1, top);
    say(&p, 300, -1.0f, 0, NULL);
    whole(&p, FINISH_LENGTH, NULL);
    has(&p,
        "\"tokens\":[\"token_id:97\",\"token_id:300\"],\"top_logprobs\":[{\"token_id:230\":-0.5,",
        "token ids as text, also beyond the vocabulary");
    close_page(&p);
}

static void prompt_logprobs_name_ids_ranks_and_texts(void)
{
    static const struct sample_top top[] = {{'b', -0.5f}, {'c', -0.75f}};
    struct text_piece piece = {.id = 'c', .rank = 2, .logprob = -0.75f, .n_top = 2, .top = top};
    struct text_tokens scores = {0};
    struct page p;
    text_out_tokens_add(&scores, &piece);
    open_page(&p, REQUEST_COMPLETION);
    p.r.prompt_logprobs = 1;
    p.r.return_token_ids = true;
    begin(&p);
    say(&p, 'x', 0, 0, NULL);
    whole(&p, FINISH_LENGTH, &scores);
    has(&p,
        "\"stop_reason\":null,\"token_ids\":[120],\"prompt_token_ids\":[97,98],"
        "\"prompt_logprobs\":[null,{\"99\":{\"logprob\":-0.75,\"rank\":2,\"decoded_token\":\"c\"},"
        "\"98\":{\"logprob\":-0.5,\"rank\":1,\"decoded_token\":\"b\"}}]}]",
        "completions show them in the choice");
    close_page(&p);
    open_page(&p, REQUEST_CHAT);
    p.r.prompt_logprobs = 0;
    p.r.return_token_ids = true;
    begin(&p);
    whole(&p, FINISH_LENGTH, &scores);
    has(&p,
        "\"service_tier\":null,\"prompt_logprobs\":[null,{\"99\":{\"logprob\":-0.75,\"rank\":2,"
        "\"decoded_token\":\"c\"}}],\"prompt_token_ids\":[97,98]}",
        "chat shows them beside the choices");
    text_out_tokens_fini(&scores);
    close_page(&p);
}

static void errors_are_events_of_their_own(void)
{
    struct page p;
    struct api_error e;
    open_page(&p, REQUEST_CHAT);
    begin(&p);
    error_set(&e, 500, NULL, NULL, "two\nlines");
    render_error_event(&p.w, &e);
    ok(strcmp(p.w.p, "data: {\"error\":{\"message\":\"two?lines\",\"type\":\"server_error\","
                     "\"param\":null,\"code\":\"internal_error\"}}\n\n") == 0,
       "one line of JSON in the error's shape");
    close_page(&p);
}

static void budgets_are_told_as_they_were_asked(void)
{
    static const struct {
        float budget;
        const char *text;
    } told[] = {{0.05f, "0.05"},   {1, "1"},      {0.1f, "0.1"},           {300, "300"},
                {1e6f, "1000000"}, {2.5f, "2.5"}, {1 << 30, "1073741824"}, {1e-5f, "1e-05"}};
    for (size_t i = 0; i < ARRAY_LEN(told); i++) {
        struct page p;
        char want[160];
        struct usage u = {.prompt = 1, .completion = 2, .plugin = "wave", .budget = told[i].budget};
        open_page(&p, REQUEST_CHAT);
        p.r.stream = p.r.include_usage = true;
        begin(&p);
        render_last(&p.v, &p.w, &u);
        snprintf(want, sizeof want,
                 "\"choices\":[],\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":2,"
                 "\"total_tokens\":3,\"sparse_details\":{\"plugin\":\"wave\",\"budget\":%s}}}",
                 told[i].text);
        has(&p, want, told[i].text);
        close_page(&p);
    }
}

int main(void)
{
    whole_chat_answers_have_every_key();
    chat_logprobs_carry_bytes();
    completion_logprobs_merge_equal_texts();
    prompt_logprobs_name_ids_ranks_and_texts();
    errors_are_events_of_their_own();
    budgets_are_told_as_they_were_asked();
    return tap_done();
}
