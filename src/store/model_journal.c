/* The journal beside an unfinished model file. See model_journal.h. Layer: store. */
#include "store/model_journal.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "store/hdf5_error.h"

#define HEAD "k3decode-journal 1 "

enum { PATH_SIZE = 48 }; /* as K3TensorSpec.path */

typedef struct {
  char path[PATH_SIZE];
  uint32_t crc;
} Line;

struct K3ModelJournal {
  char name[PATH_MAX];
  FILE *file;
  Line *lines; /* as read, sorted by path */
  int64_t count;
};

static K3Status new_journal(const char *partial, K3ModelJournal **journal)
{
  *journal = calloc(1, sizeof **journal);
  if (!*journal) K3_FAIL(K3_ERR_INPUT, "%s: no memory", partial);
  if ((size_t)snprintf((*journal)->name, PATH_MAX, "%s.journal", partial) < PATH_MAX) return K3_OK;
  k3_model_journal_close(*journal);
  *journal = NULL;
  K3_FAIL(K3_ERR_INPUT, "%s.journal: the path is too long", partial);
}

K3Status k3_model_journal_create(const char *partial, uint64_t identity, K3ModelJournal **result)
{
  K3ModelJournal *journal = NULL;
  *result = NULL;
  K3_TRY(new_journal(partial, &journal));
  journal->file = fopen(journal->name, "we");
  if (journal->file && fprintf(journal->file, HEAD "%016" PRIx64 "\n", identity) > 0 && fflush(journal->file) == 0) {
    *result = journal;
    return K3_OK;
  }
  K3Status status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__, "%s: cannot be written: %s", journal->name,
                                   K3_ERRNO_REASON(errno));
  unlink(journal->name);
  k3_model_journal_close(journal);
  return status;
}

static int compare_lines(const void *a, const void *b)
{
  return strcmp(((const Line *)a)->path, ((const Line *)b)->path);
}

/* The lines after the first, up to one that is torn; *end is where that one begins. */
static K3Status read_lines(K3ModelJournal *journal, FILE *file, long *end)
{
  char text[128], newline = 0;
  int64_t room = 0;
  Line line;
  while (fgets(text, sizeof text, file) && sscanf(text, "%8" SCNx32 " %47s%c", &line.crc, line.path, &newline) == 3 &&
         newline == '\n') {
    if (journal->count == room) {
      room = room ? 2 * room : 256;
      Line *larger = realloc(journal->lines, (size_t)room * sizeof *larger);
      if (!larger) K3_FAIL(K3_ERR_INPUT, "%s: no memory", journal->name);
      journal->lines = larger;
    }
    journal->lines[journal->count++] = line;
    *end = ftell(file);
  }
  if (journal->count > 0) qsort(journal->lines, (size_t)journal->count, sizeof *journal->lines, compare_lines);
  return K3_OK;
}

K3Status k3_model_journal_open(const char *partial, uint64_t identity, K3ModelJournal **result)
{
  K3Status status = K3_OK;
  char text[128] = "", wanted[64];
  K3ModelJournal *journal = NULL;
  *result = NULL;
  K3_TRY(new_journal(partial, &journal));
  snprintf(wanted, sizeof wanted, HEAD "%016" PRIx64 "\n", identity);
  journal->file = fopen(journal->name, "r+e");
  if (!journal->file && errno != ENOENT)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: left by another run and cannot be opened: %s", journal->name,
                 K3_ERRNO_REASON(errno));
  if (!journal->file || !fgets(text, sizeof text, journal->file) || strcmp(text, wanted) != 0) goto done;
  long end = ftell(journal->file);
  K3_TRY_DONE(read_lines(journal, journal->file, &end));
  /* New lines follow the last whole one. */
  if (fseek(journal->file, end, SEEK_SET) != 0 || ftruncate(fileno(journal->file), end) != 0)
    K3_FAIL_DONE(K3_ERR_INPUT, "%s: cannot be gone on with: %s", journal->name, K3_ERRNO_REASON(errno));
  *result = journal;
  return K3_OK;
done:
  k3_model_journal_close(journal);
  return status;
}

int k3_model_journal_find(const K3ModelJournal *journal, const char *path, uint32_t *crc)
{
  Line key = {.crc = 0};
  snprintf(key.path, sizeof key.path, "%s", path);
  const Line *line =
      journal->count ? bsearch(&key, journal->lines, (size_t)journal->count, sizeof key, compare_lines) : NULL;
  if (line) *crc = line->crc;
  return line != NULL;
}

K3Status k3_model_journal_add(K3ModelJournal *journal, const char *path, uint32_t crc)
{
  if (fprintf(journal->file, "%08" PRIx32 " %s\n", crc, path) < 0 || fflush(journal->file) != 0)
    K3_FAIL(K3_ERR_INPUT, "%s: cannot be written: %s", journal->name, K3_ERRNO_REASON(errno));
  return K3_OK;
}

K3Status k3_model_journal_remove(const char *partial)
{
  K3ModelJournal *journal = NULL;
  char head[sizeof HEAD] = "";
  K3_TRY(new_journal(partial, &journal));
  journal->file = fopen(journal->name, "re");
  size_t bytes = journal->file ? fread(head, 1, sizeof head - 1, journal->file) : 0;
  if (memcmp(head, HEAD, bytes) != 0) { /* shorter than HEAD: of a run that was killed as it began */
    K3Status status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__,
                                     "%s is in the way, and k3decode did not make it; move it or choose another output",
                                     journal->name);
    k3_model_journal_close(journal);
    return status;
  }
  int failed = unlink(journal->name) != 0 && errno != ENOENT, error = errno;
  k3_model_journal_close(journal);
  if (failed)
    K3_FAIL(K3_ERR_INPUT, "%s.journal: left by another run and cannot be removed: %s", partial, strerror(error));
  return K3_OK;
}

void k3_model_journal_close(K3ModelJournal *journal)
{
  if (!journal) return;
  if (journal->file) fclose(journal->file);
  free(journal->lines);
  free(journal);
}
