/* A tiny model that the program makes itself: what `./dev up` serves where no real one can be had, and what tests use.
 *
 * "dunlin-tiny" is a Llama of two layers with random weights, a byte-level BPE of 256 bytes and some words, and a chat
 * template. It answers with words in no order: it shows that the machinery works and knows nothing. The file is the
 * same bytes on every machine (about 300 kB). Plain function; any thread.
 */
#ifndef DN_ENGINE_TINY_H
#define DN_ENGINE_TINY_H

#include "base/err.h"

#define DN_TINY_NAME "dunlin-tiny"

/* Writes the GGUF file. Errors: DN_IO. */
int dn_tiny_write(const char *path, struct dn_err *err);

#endif
