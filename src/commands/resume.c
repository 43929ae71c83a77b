/* See resume.h. Layer: commands. */
#include "commands/resume.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config.h"
#include "store/disk_space.h"
#include "store/partial_file.h"

K3Status k3_resume_check(const K3ResumeOptions *options, const K3SessionOptions *session, int64_t context,
                         int64_t steps, const char *output)
{
  const char *to = options->proceed ? options->proceed : options->snapshot;
  if (options->proceed && options->snapshot)
    K3_FAIL(K3_ERR_USAGE, "--continue F writes its snapshot to F: leave --snapshot out");
  if (options->every && !to) K3_FAIL(K3_ERR_USAGE, "--snapshot-every N goes with --snapshot F or --continue F");
  if ((to || options->resume) && session->slice_world)
    K3_FAIL(K3_ERR_USAGE,
            "--slice is one rank's part of a decode: it has no whole state for --snapshot, --resume or --continue");
  if (options->resume && context) K3_FAIL(K3_ERR_USAGE, "--resume brings its own cache: leave --context out");
  if (steps == 0 && !to)
    K3_FAIL(K3_ERR_USAGE,
            "--steps 0 reads the prompt and decodes nothing: it goes with --snapshot F, which keeps what was read");
  if (steps == 0 && output)
    K3_FAIL(K3_ERR_USAGE, "--steps 0 decodes nothing that a run file could hold: leave --output out");
  if (to && output && strcmp(to, output) == 0)
    K3_FAIL(K3_ERR_USAGE, "the snapshot and --output are the same file, %s: give them two names", to);
  return K3_OK;
}

/* The first field in which two models differ, in words; "" when none does. */
static void name_difference(const K3Config *there, const K3Config *here, char *text, size_t size)
{
  text[0] = '\0';
  for (int i = 0; i < k3_config_field_count; i++) {
    const K3ConfigField *field = &k3_config_fields[i];
    double a = k3_config_get(there, field), b = k3_config_get(here, field);
    if (a == b) continue;
    snprintf(text, size, "; %s is %.17g there and %.17g here", field->name, a, b);
    return;
  }
}

static K3Status check_model(const K3Resume *resume, const K3Source *source)
{
  const K3SnapshotInfo *info = k3_snapshot_info(resume->snapshot);
  char difference[128];
  if (info->model_digest == source->digest) return K3_OK;
  name_difference(&info->config, &source->config, difference, sizeof difference);
  K3_FAIL(K3_ERR_INPUT, "%s is of another model: %s has the digest %016llx, and the snapshot's %s %016llx%s",
          resume->from, source->origin, (unsigned long long)source->digest, info->model,
          (unsigned long long)info->model_digest, difference);
}

K3Status k3_resume_open(K3Comm *comm, const K3ResumeOptions *options, const K3Source *source, int64_t context,
                        K3Resume *resume)
{
  struct stat found;
  K3Status status = K3_OK;
  int here = options->proceed && stat(options->proceed, &found) == 0;
  int64_t there = here; /* rank 0's answer is that of all */
  *resume =
      (K3Resume){.to = options->proceed ? options->proceed : options->snapshot, .first_context = context, .saved = -1};
  K3_TRY(comm->broadcast(comm, &there, 1, K3_ELEMENT_I64, 0));
  if (here && !there)
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__,
                            "%s is here and missing where rank 0 looks for it, so the job would begin anew: put it where "
                            "all ranks see it, or remove it to begin anew",
                            options->proceed);
  K3_TRY(k3_comm_agree(comm, status));
  resume->from = there ? options->proceed : options->resume;
  if (!resume->from) return K3_OK;
  K3_TRY(k3_state_open(comm, resume->from, &resume->snapshot));
  const K3SnapshotInfo *info = k3_snapshot_info(resume->snapshot);
  status = check_model(resume, source);
  if (status == K3_OK && there && !options->resume && info->first_context != context)
    status = k3_status_fail(K3_ERR_INPUT, __FILE__, __LINE__,
                            "%s began with --context %lld: give the same, or another file to --continue", resume->from,
                            (long long)info->first_context);
  resume->first_context = info->first_context;
  return k3_comm_agree(comm, status);
}

/* With --continue: the prompt given is the job's, or (with --resume) what the job added. */
static K3Status check_same_prompt(const K3Resume *resume, const K3ResumeOptions *options, const int64_t *given,
                                  int64_t count)
{
  int64_t skipped = resume->prompt_count - count;
  if (count == 0) return K3_OK;
  if (skipped < 0 || (skipped > 0 && !options->resume) ||
      memcmp(resume->tokens + skipped, given, (size_t)count * sizeof *given) != 0)
    K3_FAIL(K3_ERR_INPUT, "%s continues another prompt, of %lld tokens: give that one, or another file to --continue",
            resume->from, (long long)resume->prompt_count);
  return K3_OK;
}

K3Status k3_resume_join(K3Resume *resume, const K3ResumeOptions *options, const int64_t *given, int64_t count,
                        int64_t steps)
{
  const K3SnapshotInfo *info = resume->snapshot ? k3_snapshot_info(resume->snapshot) : NULL;
  int continues = info && resume->from == options->proceed;
  int64_t before = info ? info->token_count : 0, added = continues ? 0 : count;
  resume->fed = info ? info->fed : 0;
  resume->count = before + added;
  resume->prompt_count = continues ? info->prompt_count : resume->count;
  resume->first_step = resume->count - resume->prompt_count;
  resume->steps = steps > resume->first_step ? steps - resume->first_step : 0;
  resume->tokens = malloc((size_t)(resume->count + resume->steps) * sizeof *resume->tokens);
  if (!resume->tokens)
    K3_FAIL(K3_ERR_INPUT, "no memory for %lld token ids", (long long)(resume->count + resume->steps));
  if (before) memcpy(resume->tokens, k3_snapshot_tokens(resume->snapshot), (size_t)before * sizeof *resume->tokens);
  if (added) memcpy(resume->tokens + before, given, (size_t)added * sizeof *given);
  return continues ? check_same_prompt(resume, options, given, count) : K3_OK;
}

int k3_resume_is_done(const K3Resume *resume)
{
  return resume->from && resume->from == resume->to && resume->steps == 0 && resume->fed == resume->count - 1;
}

K3Status k3_resume_check_target(const K3Resume *resume, const K3ResumeOptions *options, int overwrite,
                                const char *model)
{
  if (!resume->to) return K3_OK;
  if (k3_session_same_file(model, resume->to))
    K3_FAIL(K3_ERR_INPUT, "%s: the snapshot would replace the model itself; choose another file", resume->to);
  return k3_partial_check(resume->to, overwrite || options->proceed != NULL, K3_SNAPSHOT_FORMAT, "snapshot");
}

K3Status k3_resume_check_room(const K3Resume *resume, const K3StateOwner *owner, int64_t positions)
{
  char partial[PATH_MAX];
  if (!resume->to) return K3_OK;
  snprintf(partial, sizeof partial, "%s.partial", resume->to);
  K3_TRY(k3_partial_remove_leftover(partial)); /* it takes room */
  K3SnapshotInfo info = {.config = *owner->config,
                         .first_context = resume->first_context,
                         .fed = positions - resume->first_context,
                         .token_count = resume->count + resume->steps};
  snprintf(info.cache_type, sizeof info.cache_type, "%s", k3_cache_type_names[owner->backend->cache_type]);
  return k3_disk_space_check(resume->to, "snapshot", k3_snapshot_bytes(&info), "choose another place for it");
}

int64_t k3_resume_position(const K3Resume *resume) { return resume->first_context + resume->fed; }

K3Status k3_resume_restore(K3Resume *resume, const K3StateOwner *owner)
{
  if (!resume->snapshot) return K3_OK;
  K3_TRY(k3_state_read(owner, resume->snapshot));
  k3_snapshot_close(resume->snapshot);
  resume->snapshot = NULL;
  return K3_OK;
}

K3Status k3_resume_save(K3Resume *resume, const K3StateOwner *owner, const K3Source *source, int64_t fed, int overwrite)
{
  if (!resume->to || resume->saved == fed) return K3_OK;
  K3SnapshotInfo info = {.model_digest = source->digest,
                         .config = source->config,
                         .ranks = owner->comm->world,
                         .first_context = resume->first_context,
                         .fed = resume->fed + fed,
                         .prompt_count = resume->prompt_count,
                         .token_count = resume->count};
  snprintf(info.program_version, sizeof info.program_version, "%s", PACKAGE_VERSION);
  snprintf(info.model, sizeof info.model, "%s", source->origin);
  snprintf(info.backend, sizeof info.backend, "%s", owner->backend->name);
  snprintf(info.activations, sizeof info.activations, "%s", owner->backend->activations);
  snprintf(info.cache_type, sizeof info.cache_type, "%s", k3_cache_type_names[owner->backend->cache_type]);
  K3_TRY(k3_comm_agree(owner->comm, k3_session_start_time(info.time)));
  /* What a run has written once it may replace. */
  K3_TRY(k3_state_write(owner, resume->to, &info, resume->tokens, overwrite || resume->saved >= 0));
  resume->saved = fed;
  return K3_OK;
}

char *k3_resume_free_name(const char *path)
{
  size_t room = strlen(path) + 16;
  char *name = malloc(room);
  const char *slash = strrchr(path, '/'), *dot = strrchr(path, '.');
  if (!dot || dot == path || (slash && dot <= slash + 1)) dot = path + strlen(path);
  if (name) strcpy(name, path);
  for (int part = 2; name && access(name, F_OK) == 0; part++)
    snprintf(name, room, "%.*s.%d%s", (int)(dot - path), path, part, dot);
  return name;
}

void k3_resume_close(K3Resume *resume)
{
  k3_snapshot_close(resume->snapshot);
  free(resume->tokens);
  *resume = (K3Resume){0};
}
