/* Snapshots as the run command uses them: where a run begins, and where its state goes. Layer: commands.
 * Calls with a communicator are collective and agree on failure. */
#ifndef K3_COMMANDS_RESUME_H
#define K3_COMMANDS_RESUME_H

#include "comm/comm.h"
#include "commands/session.h"
#include "decode/snapshot.h"
#include "store/source.h"

typedef struct {
  const char *resume;   /* --resume F */
  const char *snapshot; /* --snapshot F */
  const char *proceed;  /* --continue F */
  int64_t every;        /* --snapshot-every N, 0: at the end alone */
} K3ResumeOptions;

typedef struct {
  const char *from, *to; /* files; NULL: none */
  K3Snapshot *snapshot;  /* `from`, open until the state has been read */
  int64_t *tokens;       /* prompt, and what was decoded; room for the steps to come */
  int64_t count;         /* known so far */
  int64_t fed;           /* of them, before this run */
  int64_t prompt_count;  /* given, not decoded */
  int64_t first_context; /* synthetic positions before the first token */
  int64_t steps;         /* to decode in this run */
  int64_t first_step;    /* decoded by the same job before this run */
  int64_t saved;         /* tokens fed when the last snapshot was written, -1: none by this run */
} K3Resume;

/* What goes together. Errors: K3_ERR_USAGE. */
K3Status k3_resume_check(const K3ResumeOptions *options, const K3SessionOptions *session, int64_t context,
                         int64_t steps, const char *output);

/* Finds where to begin; opens that snapshot and checks that it is of this model.
 * Errors: K3_ERR_INPUT (no snapshot, also on one rank alone; damaged; of another model: both digests). */
K3Status k3_resume_open(K3Comm *comm, const K3ResumeOptions *options, const K3Source *source, int64_t context,
                        K3Resume *resume);

/* The tokens of the run: `given` [count] after those of the snapshot; with --continue they must be the job's own prompt.
 * steps: of the command line. Errors: K3_ERR_INPUT. */
K3Status k3_resume_join(K3Resume *resume, const K3ResumeOptions *options, const int64_t *given, int64_t count,
                        int64_t steps);

/* Everything was decoded before (--continue). */
int k3_resume_is_done(const K3Resume *resume);

/* Rank 0, before loading: could the snapshot be written? Errors: K3_ERR_INPUT. */
K3Status k3_resume_check_target(const K3Resume *resume, const K3ResumeOptions *options, int overwrite,
                                const char *model);

/* The same: is there room for the snapshot at the end of the run, when so many positions are cached? Errors: K3_ERR_INPUT. */
K3Status k3_resume_check_room(const K3Resume *resume, const K3StateOwner *owner, int64_t positions);

/* Positions cached when the run begins. */
int64_t k3_resume_position(const K3Resume *resume);

/* Reads the state into the loaded backend, when there is one to read, and lets the file go. */
K3Status k3_resume_restore(K3Resume *resume, const K3StateOwner *owner);

/* Writes the state after `fed` tokens of this run. */
K3Status k3_resume_save(K3Resume *resume, const K3StateOwner *owner, const K3Source *source, int64_t fed,
                        int overwrite);

/* RUN.h5, or RUN.2.h5, RUN.3.h5 …: the first that is not there. The caller frees it; NULL: no memory. */
char *k3_resume_free_name(const char *path);

void k3_resume_close(K3Resume *resume);

#endif
