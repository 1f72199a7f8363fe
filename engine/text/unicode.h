/* What the pre-tokenizers and NFC know about a code point.
 *
 * The tables (unicode_table.c) are written by make_unicode.py, which asks the `tokenizers` library
 * about every code point: its regular expressions are Unicode 16, its is_numeric 17, its NFC older.
 * A two-stage table is 256 code points per page, equal pages stored once: two loads a look-up. */
#ifndef ENGINE_TEXT_UNICODE_H
#define ENGINE_TEXT_UNICODE_H

#include "kernels/base.h"

enum unicode_class {
    UNICODE_LETTER = 1,   /* \p{L} */
    UNICODE_NUMBER = 2,   /* \p{N} */
    UNICODE_SPACE = 4,    /* \s: White_Space */
    UNICODE_NUMERIC = 8,  /* Rust's char::is_numeric: nearly, but not exactly, \p{N} */
    UNICODE_NFC_SLOW = 16 /* NFC may change it, move it, or join it with what is before it */
};

struct unicode_decomposition {
    uint32_t cp;
    uint16_t at; /* in unicode_decomposed_pool */
    uint8_t len; /* 1 to 4: the full canonical decomposition */
};

struct unicode_composition {
    uint32_t first, second, result;
};

extern const uint8_t unicode_class_index[0x1100];
extern const uint8_t unicode_class_pages[];
extern const uint8_t unicode_combining_index[0x1100];
extern const uint8_t unicode_combining_pages[];
extern const uint32_t unicode_decomposed_pool[];
extern const struct unicode_decomposition unicode_decompositions[]; /* ascending cp */
extern const struct unicode_composition unicode_compositions[];     /* ascending first, second */
extern const uint32_t unicode_n_decompositions, unicode_n_compositions;

/* Bits of enum unicode_class; cp <= 0x10ffff. */
static inline unsigned unicode_class_of(uint32_t cp)
{
    return unicode_class_pages[(size_t)unicode_class_index[cp >> 8] * 256 + (cp & 255)];
}

/* Canonical combining class of a code point that has no decomposition of its own. */
static inline unsigned unicode_combining_of(uint32_t cp)
{
    return unicode_combining_pages[(size_t)unicode_combining_index[cp >> 8] * 256 + (cp & 255)];
}

#endif
