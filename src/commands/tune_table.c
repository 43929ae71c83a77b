/* See tune_table.h. Layer: commands. */
#include "commands/tune_table.h"

#include <stdio.h>

static const char *kernel_name(const K3AttentionTrial *t)
{
  return t->kernel == K3_ATTENTION_KERNEL_TENSOR ? "tensor" : "core";
}

void k3_tune_print_head(const K3TuningFile *file)
{
  const K3AttentionTuning *tuning = &file->tuning;
  printf("# %s\n# %s\n# model %s, digest %016llx: %lld heads, kv_lora_rank %lld, qk_rope_head_dim %lld; cache in %s\n",
         file->command, file->versions, file->model, (unsigned long long)file->model_digest,
         (long long)tuning->num_heads, (long long)tuning->latent, (long long)tuning->rope, tuning->cache);
  printf("# %s; kernels %s; started %s\n", file->device_line, tuning->kernels, file->start_time);
  printf("# slice: the slice kernel alone; with merge: and the merge of its partials, which the choice goes by; "
         "medians and\n"
         "# percentiles of a launch over replays of a chain of launches, each over another copy of the cache; more "
         "than the L2\n"
         "# lies between two uses of a copy, unless such a chain takes over 6 ms\n");
  printf("# GB/s: the rows of the cache, each once, over the slice kernel's time; shared memory is a block's\n#\n");
  printf("# %-6s %5s %8s %5s %5s %6s %7s %7s | %9s %9s %9s | %9s %9s %9s | %7s %5s %7s %6s  %s\n", "kernel", "heads",
         "rows", "width", "tile", "passes", "slices", "blocks", "slice", "p10", "p90", "w. merge", "p10", "p90", "rate",
         "regs", "shared", "blk/SM", "");
  printf("# %-6s %5s %8s %5s %5s %6s %7s %7s | %9s %9s %9s | %9s %9s %9s | %7s %5s %7s %6s\n", "", "", "", "heads",
         "rows", "", "", "", "ms", "ms", "ms", "ms", "ms", "ms", "GB/s", "", "bytes", "");
  fflush(stdout);
}

void k3_tune_print_trials(const K3TuningFile *file, int64_t first)
{
  for (int64_t i = first; i < file->tuning.count; i++) {
    const K3AttentionTrial *t = &file->tuning.trial[i];
    printf("  %-6s %5lld %8lld %5lld %5lld %6lld %7lld %7lld | %9.5f %9.5f %9.5f | %9.5f %9.5f %9.5f | %7.0f %5lld "
           "%7lld %6lld  "
           "%s%s%s\n",
           kernel_name(t), (long long)t->heads, (long long)t->rows, (long long)t->heads_per_pass,
           (long long)t->tile_rows, (long long)t->passes, (long long)t->slices, (long long)t->blocks, t->slice_ms,
           t->slice_p10, t->slice_p90, t->ms, t->p10, t->p90, t->gbs, (long long)t->registers,
           (long long)t->shared_bytes, (long long)t->blocks_per_sm, t->chosen ? "chosen " : "",
           t->planned ? "planner's " : "", t->step ? "occupancy step" : "");
  }
  fflush(stdout);
}

/* The planner's own trial of the same size. */
static const K3AttentionTrial *planned_beside(const K3AttentionTuning *tuning, const K3AttentionTrial *t)
{
  for (int64_t i = 0; i < tuning->count; i++) {
    const K3AttentionTrial *other = &tuning->trial[i];
    if (other->planned && other->kernel == t->kernel && other->heads == t->heads && other->rows == t->rows)
      return other;
  }
  return NULL;
}

void k3_tune_print_choices(const K3TuningFile *file)
{
  const K3AttentionTuning *tuning = &file->tuning;
  int64_t steps = 0;
  printf("#\n# chosen: the fastest with its merge, or the planner's own where that is as fast within the spread\n");
  printf("# %-6s %5s %10s %10s %5s %7s %9s %10s %8s\n", "kernel", "heads", "from", "to", "width", "slices", "w. merge",
         "planner's", "times");
  printf("# %-6s %5s %10s %10s %5s %7s %9s %10s\n", "", "", "rows", "rows", "heads", "", "ms", "ms");
  for (int64_t i = 0; i < tuning->count; i++) {
    const K3AttentionTrial *t = &tuning->trial[i];
    steps += t->step;
    if (!t->chosen) continue;
    const K3AttentionTrial *own = planned_beside(tuning, t);
    printf("  %-6s %5lld %10lld %10lld %5lld %7lld %9.5f", kernel_name(t), (long long)t->heads, (long long)t->rows_from,
           (long long)t->rows_to, (long long)t->heads_per_pass, (long long)t->slices, t->ms);
    if (own) printf(" %10.5f %8.2f\n", own->ms, own->ms / t->ms);
    else printf(" %10s\n", "-");
  }
  if (steps == 0) printf("# occupancy: no step, a kernel's widths all leave as many blocks on a multiprocessor\n");
  else
    printf("# occupancy: %lld trials stand behind a step, where a width leaves fewer blocks on a multiprocessor\n",
           (long long)steps);
  fflush(stdout);
}

K3Status k3_command_info_tuning(const char *path)
{
  K3TuningFile *file;
  K3_TRY(k3_tuning_file_read(path, &file));
  printf("# tuning file %s, made by k3decode %s\n", path, file->version);
  k3_tune_print_head(file);
  k3_tune_print_trials(file, 0);
  k3_tune_print_choices(file);
  k3_tuning_file_close(file);
  return K3_OK;
}
