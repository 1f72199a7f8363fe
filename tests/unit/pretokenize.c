/* Where pieces end, and the tables that say so. */
#include "engine/text/pretokenize.h"
#include "engine/text/normalize.h"
#include "engine/text/unicode.h"
#include "kernels/core/sha256.h"
#include "tests/tap.h"

/* Pieces joined by '|'. */
static void cuts(enum pretokenizer which, const char *text, const char *want)
{
    char got[256];
    size_t n = 0;
    const char *end = text + strlen(text);
    for (const char *p = text; p < end;) {
        size_t len = pretokenize_next(which, p, end);
        if (p > text)
            got[n++] = '|';
        memcpy(got + n, p, len);
        n += len;
        p += len;
    }
    got[n] = '\0';
    static const char *const names[] = {"gpt-2", "smollm", "llama-3", "qwen2"};
    char shown[256];
    size_t k = 0;
    for (const char *p = want; *p != '\0' && k + 5 < sizeof shown; p++)
        k += (size_t)snprintf(shown + k, sizeof shown - k, *p < ' ' || *p > '~' ? "\\x%02x" : "%c",
                              (unsigned char)*p);
    if (!ok(strcmp(got, want) == 0, "%s: %s", names[which], shown))
        printf("#   got %s\n", got);
}

static void a_space_goes_with_the_word_after_it(void)
{
    cuts(PRETOKENIZE_GPT2, "a cat  sat", "a| cat| | sat");
    cuts(PRETOKENIZE_GPT2, "hello   ", "hello|   ");
    cuts(PRETOKENIZE_GPT2, "x\n\n y", "x|\n\n| y");
    cuts(PRETOKENIZE_GPT2, "x \n y", "x| \n| y");
    cuts(PRETOKENIZE_GPT2, "x\ty", "x|\t|y");
    cuts(PRETOKENIZE_GPT2, "\xc2\xa0\xc2\xa0hello", "\xc2\xa0|\xc2\xa0|hello");
    cuts(PRETOKENIZE_GPT2, "a  \xcc\x81", "a| | \xcc\x81"); /* a mark is neither letter nor space */
}

static void contractions_are_cut_off_in_lower_case_only(void)
{
    cuts(PRETOKENIZE_GPT2, "don't we'll they've", "don|'t| we|'ll| they|'ve");
    cuts(PRETOKENIZE_GPT2, "DON'T", "DON|'|T");
    cuts(PRETOKENIZE_LLAMA3, "DON'T we'LL", "DON|'T| we|'LL");
    cuts(PRETOKENIZE_QWEN2,
         "'\xc5\xbf"
         "ay",
         "'\xc5\xbf|ay");
    cuts(PRETOKENIZE_GPT2, "'", "'");
    cuts(PRETOKENIZE_LLAMA3, "'r", "'r"); /* an apostrophe may lead a word there */
}

static void numbers_are_cut_as_each_model_was_trained(void)
{
    cuts(PRETOKENIZE_GPT2, "ab 1234 5", "ab| 1234| 5");
    cuts(PRETOKENIZE_SMOLLM, "ab 1234 5", "ab| |1|2|3|4| |5");
    cuts(PRETOKENIZE_SMOLLM, "a  1", "a|  |1"); /* the look-ahead does not see the digit */
    cuts(PRETOKENIZE_SMOLLM, "\xc2\xb2x", "\xc2\xb2|x");
    cuts(PRETOKENIZE_LLAMA3, "12345678", "123|456|78");
    cuts(PRETOKENIZE_QWEN2, "123 4", "1|2|3| |4");
    cuts(PRETOKENIZE_LLAMA3, "\xef\xbc\x91\xef\xbc\x92", "\xef\xbc\x91\xef\xbc\x92");
}

static void new_lines_end_pieces_in_llama3(void)
{
    cuts(PRETOKENIZE_LLAMA3, "  \n\n  x", "  \n\n| | x");
    cuts(PRETOKENIZE_LLAMA3, "a\r\n\r\nb", "a|\r\n\r\n|b");
    cuts(PRETOKENIZE_LLAMA3, "x!\n\ny", "x|!\n\n|y");
    cuts(PRETOKENIZE_LLAMA3, "\tx .y", "\tx| .|y");
    cuts(PRETOKENIZE_LLAMA3, "\xe1\xa0\x8e a", "\xe1\xa0\x8e| a"); /* U+180E is no white space */
}

static void broken_text_is_cut_without_reading_past_it(void)
{
    cuts(PRETOKENIZE_GPT2, "a\xe2\x82", "a|\xe2\x82");
    cuts(PRETOKENIZE_LLAMA3, "\xff\xff", "\xff\xff");
    cuts(PRETOKENIZE_SMOLLM, "\xf0 1", "\xf0| |1");
}

static void names_of_files_are_known(void)
{
    enum pretokenizer p;
    ok(pretokenize_find("smollm", &p) && p == PRETOKENIZE_SMOLLM, "smollm");
    ok(pretokenize_find("gpt2", &p) && p == PRETOKENIZE_GPT2, "gpt2");
    ok(pretokenize_find("llama3", &p) && p == PRETOKENIZE_LLAMA3, "llama3");
    ok(!pretokenize_find("tekken", &p), "tekken is not known yet");
}

static void add(struct sha256 *c, uint32_t x)
{
    unsigned char b[4] = {(unsigned char)x, (unsigned char)(x >> 8), (unsigned char)(x >> 16),
                          (unsigned char)(x >> 24)};
    sha256_add(c, b, sizeof b);
}

/* Of what the tables say, not of how they are laid out. */
static void table_digest(char hex[2 * SHA256_BYTES + 1])
{
    struct sha256 c;
    unsigned char out[SHA256_BYTES];
    sha256_init(&c);
    for (uint32_t cp = 0; cp < 0x110000; cp++)
        add(&c, unicode_class_of(cp) | unicode_combining_of(cp) << 8);
    for (uint32_t i = 0; i < unicode_n_decompositions; i++) {
        add(&c, unicode_decompositions[i].cp);
        for (unsigned k = 0; k < unicode_decompositions[i].len; k++)
            add(&c, unicode_decomposed_pool[unicode_decompositions[i].at + k]);
    }
    for (uint32_t i = 0; i < unicode_n_compositions; i++) {
        add(&c, unicode_compositions[i].first);
        add(&c, unicode_compositions[i].second);
        add(&c, unicode_compositions[i].result);
    }
    sha256_done(&c, out);
    for (size_t i = 0; i < sizeof out; i++)
        snprintf(hex + 2 * i, 3, "%02x", out[i]);
}

static void the_tables_are_those_measured(void)
{
    unsigned n[4] = {0};
    for (uint32_t cp = 0; cp < 0x110000; cp++)
        for (unsigned k = 0; k < 4; k++)
            n[k] += unicode_class_of(cp) >> k & 1;
    is_int(n[0], 141028, "letters: as many as tokenizers 0.23.3 knows");
    is_int(n[1], 1911, "numbers");
    is_int(n[2], 25, "white space");
    is_int(n[3], 1924, "numeric characters, by Rust's newer Unicode");
    char hex[2 * SHA256_BYTES + 1];
    table_digest(hex);
    if (!ok(strcmp(hex, "6d7be3b9b5be7a5ca7075ffe444f6ec62b9b169b08cc3fffc2eb815d707ae196") == 0,
            "the tables have the digest they had when measured"))
        printf("#   got %s\n", hex);
}

static void composes_to(const char *text, const char *want, const char *why)
{
    struct normalize_scratch s = {0};
    struct text_view out;
    status st = normalize_nfc(&s, (struct text_view){text, strlen(text)}, &out);
    ok(st == OK && out.len == strlen(want) && !memcmp(out.p, want, out.len), "%s", why);
    normalize_fini(&s);
}

static void text_is_composed(void)
{
    composes_to("cafe\xcc\x81!", "caf\xc3\xa9!", "a letter and its accent become one");
    composes_to("\xe2\x84\xab", "\xc3\x85", "the Angstrom sign is a letter");
    composes_to("\xe1\x84\x80\xe1\x85\xa1\xe1\x86\xa8", "\xea\xb0\x81", "three jamo, a syllable");
    composes_to("\xea\xb0\x80\xe1\x86\xa8", "\xea\xb0\x81", "a syllable takes a trailing jamo");
    composes_to("a\xcc\x81\xcc\xa3", "\xe1\xba\xa1\xcc\x81", "marks are sorted before they join");
    composes_to("\xe0\xa5\x98", "\xe0\xa4\x95\xe0\xa4\xbc", "excluded compositions stay apart");
    composes_to("\xcc\x81", "\xcc\x81", "a mark alone stays");
    composes_to("\xff\xcc\x81\xc3", "\xff\xcc\x81\xc3", "bytes that are no text stay as they are");
    composes_to("abc", "abc", "ASCII is not even copied");
}

int main(void)
{
    a_space_goes_with_the_word_after_it();
    contractions_are_cut_off_in_lower_case_only();
    numbers_are_cut_as_each_model_was_trained();
    new_lines_end_pieces_in_llama3();
    broken_text_is_cut_without_reading_past_it();
    names_of_files_are_known();
    the_tables_are_those_measured();
    text_is_composed();
    return tap_done();
}
