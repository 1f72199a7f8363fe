/* Text -> the pieces inside which BPE merges: the regular expressions of the `tokenizers` library
 * as scanners written by hand. A piece depends on the text up to the end of its segment (`\s+(?!\S)`
 * looks ahead), so a scanner is given the segment's end and nothing beyond. */
#ifndef ENGINE_TEXT_PRETOKENIZE_H
#define ENGINE_TEXT_PRETOKENIZE_H

#include "kernels/base.h"

enum pretokenizer { PRETOKENIZE_GPT2, PRETOKENIZE_SMOLLM, PRETOKENIZE_LLAMA3, PRETOKENIZE_QWEN2 };

/* Knows the names that GGUF files use. */
bool pretokenize_find(const char *name, enum pretokenizer *out);
/* Bytes of the piece that starts at p < end: at least 1. */
size_t pretokenize_next(enum pretokenizer which, const char *p, const char *end);

#endif
