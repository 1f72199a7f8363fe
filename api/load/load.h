/* `spind bench serve`: a load on an OpenAI server, ours or another's, over HTTP. */
#ifndef API_LOAD_LOAD_H
#define API_LOAD_LOAD_H

/* argv: what follows `bench serve`. Exit status: 0: all was answered as asked; 1: something failed, and
 * the report says what; 2: the words were wrong. */
int load_verb(int argc, char **argv);

#endif
