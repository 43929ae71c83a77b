/* The journal beside an unfinished model file: which of its tensors are whole. Layer: store.
 * PATH.partial.journal is text: a line that tells what is being written, then one line a finished tensor with its CRC-32
 * and path. A torn last line ends it. What it says is checked against the file before it is believed (the writer does). */
#ifndef K3_STORE_MODEL_JOURNAL_H
#define K3_STORE_MODEL_JOURNAL_H

#include <stdint.h>

#include "base/status.h"

typedef struct K3ModelJournal K3ModelJournal;

/* Begins a journal for the file `partial`, replacing one that is there. Errors: K3_ERR_INPUT. */
K3Status k3_model_journal_create(const char *partial, uint64_t identity, K3ModelJournal **journal);

/* Reads the journal of `partial` to go on with it; *journal is NULL when there is none that bears `identity`.
 * Errors: K3_ERR_INPUT (memory, cannot be read). */
K3Status k3_model_journal_open(const char *partial, uint64_t identity, K3ModelJournal **journal);

/* 1 and the CRC when the journal holds the tensor `path`. */
int k3_model_journal_find(const K3ModelJournal *journal, const char *path, uint32_t *crc);

/* Adds a finished tensor. Errors: K3_ERR_INPUT (cannot be written). */
K3Status k3_model_journal_add(K3ModelJournal *journal, const char *path, uint32_t crc);

/* Removes the journal of `partial`; one that is not there is fine. Errors: K3_ERR_INPUT (that file is no journal). */
K3Status k3_model_journal_remove(const char *partial);

/* Closes and frees. Safe on NULL. */
void k3_model_journal_close(K3ModelJournal *journal);

#endif
