/* Streaming decode: whatever the chunks, the text is that of the whole. */
#include "engine/text/utf8.h"
#include "engine/text/tokenizer.h"
#include "tests/tap.h"

#define FFFD "\xef\xbf\xbd"

static size_t push(struct utf8_stream *u, const char *in, char *out)
{
    return utf8_stream_push(u, in, strlen(in), out);
}

static bool decodes_to(const char *in, const char *want)
{
    struct utf8_stream u = {0};
    char out[256];
    size_t n = push(&u, in, out);
    n += utf8_stream_flush(&u, out + n);
    return n == strlen(want) && memcmp(out, want, n) == 0;
}

static void what_is_not_utf8_becomes_replacement_characters_by_maximal_subparts(void)
{
    static const struct {
        const char *in, *want, *why;
    } cases[] = {
        {"h\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80", "h\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80",
         "characters of one to four bytes are kept"},
        {"\x80z", FFFD "z", "a lone tail is one replacement"},
        {"\xc0\xaf", FFFD FFFD, "an overlong form has no valid part: one each"},
        {"\xe0\x80\x80", FFFD FFFD FFFD, "nor has E0 80"},
        {"\xed\xa0\x80", FFFD FFFD FFFD, "nor a surrogate"},
        {"\xf4\x90\x80\x80", FFFD FFFD FFFD FFFD, "nor what is beyond U+10FFFF"},
        {"\xf0\x9f\x98z", FFFD "z", "three valid bytes of four are one replacement"},
        {"\xe2\x82\xe2\x82\xac", FFFD "\xe2\x82\xac", "a character may follow at once"},
        {"\xe2\x82", FFFD, "an unfinished character at the end is one replacement"},
        {"\xff\xfe", FFFD FFFD, "bytes that are never in UTF-8 are one each"},
    };
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        ok(decodes_to(cases[i].in, cases[i].want), "%s", cases[i].why);
}

static void a_character_waits_until_it_is_whole(void)
{
    struct utf8_stream u = {0};
    char out[64];
    is_int(push(&u, "\xf0", out), 0, "the first byte of four is held back");
    is_int(push(&u, "\x9f\x98", out), 0, "and the next two");
    is_int(push(&u, "\x80!", out), 5, "the fourth brings all, and what follows");
    ok(memcmp(out, "\xf0\x9f\x98\x80!", 5) == 0, "as they were");
    is_int(utf8_stream_flush(&u, out), 0, "then nothing is left to flush");
}

static void a_byte_that_ends_hope_is_answered_at_once(void)
{
    struct utf8_stream u = {0};
    char out[64];
    is_int(push(&u, "\xf0\x9f", out), 0, "half a character is held back");
    is_int(push(&u, "a", out), 4, "a letter proves it broken: U+FFFD and the letter");
    ok(memcmp(out, FFFD "a", 4) == 0, "in this order");
}

static uint64_t next_random(uint64_t *seed)
{
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    return *seed;
}

static void chunks_joined_are_the_whole(void)
{
    static const unsigned char edges[] = {0x00, 'a',  0x7f, 0x80, 0x8f, 0x90, 0x9f,
                                          0xa0, 0xbf, 0xc0, 0xc2, 0xdf, 0xe0, 0xe1,
                                          0xed, 0xef, 0xf0, 0xf1, 0xf4, 0xf5, 0xff};
    uint64_t seed = 20240601;
    unsigned bad = 0, too_long = 0;
    for (int round = 0; round < 50000; round++) {
        char in[16], whole[64], parts[64];
        size_t len = next_random(&seed) % 16, at = 0, n = 0, n_whole;
        for (size_t i = 0; i < len; i++)
            in[i] = (char)edges[next_random(&seed) % sizeof edges];
        struct utf8_stream u = {0};
        n_whole = utf8_stream_push(&u, in, len, whole);
        n_whole += utf8_stream_flush(&u, whole + n_whole);
        while (at < len) {
            size_t step = next_random(&seed) % (len - at + 1);
            size_t got = utf8_stream_push(&u, in + at, step, parts + n);
            too_long += got > 3 * (step + 3);
            n += got;
            at += step;
        }
        n += utf8_stream_flush(&u, parts + n);
        bad += n != n_whole || memcmp(whole, parts, n) != 0;
    }
    is_int(bad, 0, "50,000 random byte strings, cut anywhere, give the text of the whole");
    is_int(too_long, 0, "no chunk needs more room than promised");
}

static void every_code_point_survives_encode_and_decode(void)
{
    unsigned bad = 0;
    for (uint32_t cp = 0; cp < 0x110000; cp++) {
        char text[4];
        unsigned n = utf8_encode(cp, text), len;
        uint32_t back = utf8_decode(text, text + n, &len);
        bool surrogate = cp >= 0xd800 && cp < 0xe000;
        bad += surrogate ? back != UTF8_BAD : back != cp || len != n;
        if (n > 1)
            bad += utf8_decode(text, text + n - 1, &len) != UTF8_BAD || len != 1;
    }
    is_int(bad, 0, "all but the surrogates, and none when its last byte is missing");
}

int main(void)
{
    what_is_not_utf8_becomes_replacement_characters_by_maximal_subparts();
    a_character_waits_until_it_is_whole();
    a_byte_that_ends_hope_is_answered_at_once();
    chunks_joined_are_the_whole();
    every_code_point_survives_encode_and_decode();
    return tap_done();
}
