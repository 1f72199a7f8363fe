#include "engine/tool/prose.h"

#include "kernels/core/splitmix.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

enum { PER_TOPIC = 20 };

static const char *const nouns[][PER_TOPIC] = {
    {"harbour", "anchor",  "sail",  "lighthouse", "fisherman", "tide", "rope",
     "ferry",   "captain", "storm", "pilot",      "cargo",     "deck", "net",
     "pier",    "sailor",  "chart", "hull",       "bell",      "gull"},
    {"garden",     "orchard", "hedge",    "gardener", "rose",  "spade",    "apple tree",
     "greenhouse", "path",    "fountain", "seed",     "wall",  "beehive",  "lawn",
     "gate",       "ladder",  "basket",   "vine",     "frost", "blackbird"},
    {"library", "letter", "manuscript", "librarian",  "lamp",  "shelf",   "catalogue",
     "atlas",   "poem",   "scholar",    "key",        "index", "archive", "reading room",
     "ink",     "margin", "chapter",    "translator", "cover", "map"},
    {"workshop", "clock",      "spring",    "clockmaker", "gear",    "bench", "pendulum",
     "file",     "apprentice", "engraving", "tower",      "drawing", "lathe", "pocket watch",
     "screw",    "customer",   "repair",    "wheel",      "case",    "hour"},
    {"village", "market", "bakery", "baker",    "mill",        "bridge",   "church",
     "mayor",   "inn",    "well",   "carriage", "schoolhouse", "festival", "oven",
     "square",  "widow",  "rumour", "bargain",  "neighbour",   "fair"},
    {"mountain",  "valley", "shepherd", "glacier",    "hut",         "trail", "guide",
     "avalanche", "meadow", "summit",   "river",      "pine forest", "snow",  "cave",
     "eagle",     "pass",   "shelter",  "stone wall", "traveller",   "fog"},
    {"theatre",  "actor",     "stage",  "costume", "director", "curtain", "rehearsal",
     "audience", "orchestra", "violin", "script",  "mask",     "balcony", "ticket",
     "applause", "dancer",    "mirror", "singer",  "trumpet",  "scene"},
    {"court",       "judge",  "witness",    "lawyer",    "contract", "verdict", "clerk",
     "inheritance", "estate", "debt",       "signature", "jury",     "rumour",  "document",
     "promise",     "trial",  "accusation", "gentleman", "cousin",   "fortune"},
};
static const char *const people[] = {
    "Margaret", "Edward",  "Clara",   "Thomas", "Helen",  "Arthur",  "Beatrice", "Samuel",
    "Louisa",   "Henry",   "Matilda", "Oliver", "Agnes",  "Walter",  "Rosalind", "Philip",
    "Judith",   "Leonard", "Harriet", "Martin", "Sophia", "Bernard", "Eleanor",  "Gilbert"};
static const char *const places[] = {"Ashford",  "Millbrook", "Saltmarsh", "Dunmore", "Kingsbridge",
                                     "Overton",  "Thornbury", "Westley",   "Lindale", "Harrowgate",
                                     "Elmstead", "Fairhaven", "Redcliff",  "Northolt"};
static const char *const adjectives[] = {
    "old",    "quiet",   "narrow", "bright",   "broken",  "familiar", "heavy",     "strange",
    "small",  "painted", "empty",  "cheerful", "distant", "wooden",   "forgotten", "splendid",
    "modest", "crooked", "silent", "handsome", "worn",    "peculiar", "generous",  "cold"};
static const char *const verbs[] = {
    "admired",   "described", "found",     "remembered", "examined", "repaired", "praised",
    "forgot",    "avoided",   "sold",      "bought",     "visited",  "painted",  "mentioned",
    "inherited", "watched",   "protected", "mistrusted", "borrowed", "returned"};
static const char *const times[] = {
    "in the morning",       "before supper",     "at the end of the summer",
    "after the rain",       "for a long time",   "late in the evening",
    "on the following day", "during the winter", "without any warning",
    "every Sunday",         "once again",        "in the old days"};
static const char *const reasons[] = {
    "because nobody else would",         "although the {n} was {a}",
    "while {q} spoke about the {n}",     "and the {n} was never seen again",
    "so that {q} could see the {n}",     "since the road to {l} was closed",
    "before {q} had finished the {n}",   "until the {a} {n} was forgotten",
    "and {q} was secretly glad of it",   "which surprised everyone in {l}",
    "as if the {n} had been {a} before", "but {q} did not believe a word of it"};
static const char *const frames[] = {
    "{p} {v} the {a} {n} {t}.",
    "{p} {v} the {n}, {r}.",
    "{T}, {p} {v} the {n} of {q}.",
    "The {n} near {l} was {a} and {a}, {r}.",
    "\"I never {v} the {n},\" said {p}, \"and {q} knows it.\"",
    "There was a {a} {n} beside the {n}, and {p} {v} it {t}.",
    "It was {p} who {v} the {n}, {r}.",
    "The {n} belonged to {q}, but {p} {v} it {t}.",
    "{p} asked {q} about the {n}, {r}.",
    "Nobody in {l} had seen such a {a} {n} {t}.",
    "When {p} came back to {l}, the {n} was {a}.",
    "{T}, the {n} and the {n} were both {a}.",
    "\"Tell me about the {a} {n},\" said {q}, {r}.",
    "{p} thought the {n} was {a}, {r}.",
    "Every {n} in {l} reminded {p} of the {a} {n}.",
    "{p} wrote to {q} that the {n} had become {a}.",
    "The {a} {n} stood between the {n} and the {n}, {r}.",
    "{q} had always {v} the {n}, and {p} {v} it too.",
    "If the {n} had been less {a}, {p} would have gone to {l} {t}.",
    "{p} laughed, {r}.",
    "Of all the people in {l}, only {p} {v} the {a} {n}.",
    "The {n} was given to {q} {t}, {r}.",
    "{T}, a {a} {n} arrived from {l}, and {p} {v} it at once.",
    "{p} and {q} spoke of the {n} {t}.",
};

void prose_init(struct prose *p, uint64_t seed)
{
    *p = (struct prose){.random = seed ^ 0x70726f7365ull};
}

static uint32_t draw(struct prose *p, size_t n)
{
    return (uint32_t)((splitmix_next(&p->random) >> 32) * n >> 32);
}

#define DRAW(p, list) ((list)[draw((p), ARRAY_LEN(list))])

static void start_paragraph(struct prose *p)
{
    p->topic = draw(p, ARRAY_LEN(nouns));
    p->place = draw(p, ARRAY_LEN(places));
    for (int i = 0; i < PROSE_PEOPLE; i++)
        p->people[i] = draw(p, ARRAY_LEN(people));
    p->left = 4 + draw(p, 7);
}

static const char *word(struct prose *p, char slot)
{
    switch (slot) {
    case 'p': return people[p->people[0]];
    case 'q': return people[p->people[1 + draw(p, PROSE_PEOPLE - 1)]];
    case 'l': return places[p->place];
    case 'n': return nouns[p->topic][draw(p, PER_TOPIC)];
    case 'a': return DRAW(p, adjectives);
    case 'v': return DRAW(p, verbs);
    case 'T':
    case 't': return DRAW(p, times);
    default: return DRAW(p, reasons);
    }
}

static void capitalise(char *s)
{
    *s = (char)toupper((unsigned char)*s);
}

/* Fills the slots of a frame; {r} brings slots of its own. */
static size_t fill(struct prose *p, const char *frame, char *out, size_t room)
{
    size_t n = 0;
    for (; *frame && n + 1 < room; frame++) {
        if (*frame != '{') {
            out[n++] = *frame;
            continue;
        }
        char slot = frame[1];
        const char *w = word(p, slot);
        size_t at = n;
        frame += 2;
        if (slot == 'r')
            n += fill(p, w, out + n, room - n);
        else
            while (*w && n + 1 < room)
                out[n++] = *w++;
        if (slot == 'T')
            capitalise(out + at);
    }
    out[n] = '\0';
    return n;
}

/* "a old" -> "an old": a word of one letter before a vowel. Returns the new length. */
static size_t mend_articles(char *s, size_t n, size_t room)
{
    for (size_t i = 1; i + 2 < n && n + 2 < room; i++)
        if (s[i - 1] == ' ' && s[i] == 'a' && s[i + 1] == ' ' && strchr("aeiou", s[i + 2])) {
            memmove(s + i + 2, s + i + 1, n - i);
            s[i + 1] = 'n';
            n++;
        }
    return n;
}

size_t prose_sentence(struct prose *p, char *out)
{
    const char *before = p->left ? " " : p->topic || p->place ? "\n\n" : "";
    if (p->left == 0)
        start_paragraph(p);
    else
        for (int i = PROSE_PEOPLE - 1; i > 0 && draw(p, 3) == 0; i--) { /* another one acts */
            uint32_t swap = p->people[0];
            p->people[0] = p->people[i];
            p->people[i] = swap;
        }
    p->left--;
    size_t n = (size_t)snprintf(out, PROSE_MAX_SENTENCE, "%s", before);
    n += fill(p, DRAW(p, frames), out + n, PROSE_MAX_SENTENCE - n);
    return mend_articles(out, n, PROSE_MAX_SENTENCE);
}

char *prose_text(uint64_t seed, size_t bytes, size_t *len)
{
    struct prose p;
    size_t room = bytes + PROSE_MAX_SENTENCE, n = 0;
    char *out = mem_alloc(room);
    prose_init(&p, seed);
    while (n < bytes)
        n += prose_sentence(&p, out + n);
    *len = n;
    return out;
}
