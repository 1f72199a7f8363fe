/* The chat page. */
#ifndef API_PAGE_H
#define API_PAGE_H

#include "api/front.h"

/* Answers one of its paths, which are those of the route table that begin with /ui. */
void page_answer(struct api *a, struct exchange *x);

#endif
