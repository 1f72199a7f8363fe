/* What the files of engine/text share and nobody else needs. */
#ifndef ENGINE_TEXT_INTERNAL_H
#define ENGINE_TEXT_INTERNAL_H

#include "engine/text/bpe.h"
#include "engine/text/special.h"
#include "engine/text/tokenizer.h"

/* Room for n spans, until the next call; NULL: no memory. */
struct special_span *token_scratch_spans(struct token_scratch *s, size_t n);

/* tokenize() for text of mixed origin: control tokens are recognised inside the spans (ascending,
 * apart) and nowhere else. Pieces may cross the border of a span: cutting there would give other
 * ids than the model was trained on. */
status tokenize_spans(const struct tokenizer *t, struct token_scratch *s, struct text_view text,
                      const struct special_span *spans, size_t n_spans, struct id_sink *sink);

#endif
