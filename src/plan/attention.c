/* See attention.h. Layer: plan. */
#include "plan/attention_tuning.h"

static int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/* At least 90 % of `whole`? */
static int nearly(int64_t part, int64_t whole) { return part * 10 >= whole * 9; }

static K3Status check_size(const char *name, int64_t value)
{
  if (value < 1) K3_FAIL(K3_ERR_INPUT, "attention plan: %s is %lld, wanted 1 or more", name, (long long)value);
  return K3_OK;
}

static K3Status check_shape(const K3AttentionShape *s)
{
  K3_TRY(check_size("heads", s->heads));
  K3_TRY(check_size("latent", s->latent));
  K3_TRY(check_size("multiprocessors", s->multiprocessors));
  K3_TRY(check_size("resident_blocks", s->resident_blocks));
  K3_TRY(check_size("tile_rows", s->tile_rows));
  K3_TRY(check_size("widths[0]", s->widths[0]));
  K3_TRY(check_size("rows + 1", s->rows + 1)); /* no row yet is a case, not a mistake */
  return K3_OK;
}

/* The fewest passes the widest kernel allows, then the narrowest kernel that needs no more. */
static void choose_width(const K3AttentionShape *s, K3AttentionPlan *plan)
{
  int64_t widest = s->widths[0];
  for (int i = 1; i < K3_ATTENTION_MAX_WIDTHS && s->widths[i] > 0; i++) widest = s->widths[i];
  plan->passes = divide_up(s->heads, widest);
  plan->heads_per_pass = widest;
  for (int i = K3_ATTENTION_MAX_WIDTHS - 1; i >= 0; i--)
    if (s->widths[i] > 0 && divide_up(s->heads, s->widths[i]) == plan->passes) plan->heads_per_pass = s->widths[i];
}

static int64_t choose_slices(const K3AttentionShape *s, const K3AttentionPlan *plan)
{
  int64_t tiles = divide_up(s->rows, s->tile_rows);
  if (s->force_slices > 0) return s->force_slices;
  if (s->rows <= s->unsplit_rows || tiles <= 1) return 1;

  /* One wave of blocks; a division that leaves the machine idle rounds up instead of down. */
  int64_t slots = s->multiprocessors * s->resident_blocks;
  int64_t slices = slots / plan->passes;
  if (slices < 1) slices = 1;
  if (!nearly(slices * plan->passes, slots)) slices++;

  int64_t cap = s->max_head_slices > 0 ? s->max_head_slices : 2 * plan->heads_per_pass * slots;
  if (slices * s->heads > cap) slices = cap / s->heads;
  if (slices > tiles) slices = tiles;
  if (slices < 1) slices = 1;

  /* Fewer slices with the same longest slice mean fewer partials, if the machine stays full. */
  int64_t fewer = divide_up(tiles, divide_up(tiles, slices));
  if (nearly(fewer * plan->passes, s->multiprocessors)) slices = fewer;
  return slices;
}

/* Width and slices as measured. 0: nothing measured serves. */
static int take_tuned(const K3AttentionShape *s, K3AttentionPlan *plan)
{
  int64_t tiles = divide_up(s->rows, s->tile_rows);
  const K3AttentionTrial *trial =
      s->force_slices > 0 ? NULL : k3_attention_tuning_find(s->tuning, s->kernel, s->heads, s->rows);
  if (!trial) return 0;
  plan->heads_per_pass = trial->heads_per_pass;
  plan->passes = divide_up(s->heads, trial->heads_per_pass);
  plan->slices = trial->slices < tiles ? trial->slices : tiles;
  return 1;
}

int64_t k3_attention_resident_guess(K3AttentionKernel kernel, int64_t latent, int64_t width)
{
  if (kernel == K3_ATTENTION_KERNEL_TENSOR) return 1; /* its ring takes nearly all of the shared memory */
  const int64_t sm_bytes = 228 * 1024, reserved = 1024, sm_registers = 65536;
  int64_t heads = 12, tile = K3_ATTENTION_CORE_TILE_ROWS, threads = latent > 512 ? 512 : 256;
  int64_t shared = ((heads + tile) * width + tile * heads + 3 * heads) * 4; /* shared_bytes of mla_slice.cu */
  int64_t by_memory = sm_bytes / (shared + reserved), by_registers = sm_registers / (128 * threads);
  int64_t blocks = by_memory < by_registers ? by_memory : by_registers;
  return blocks < 1 ? 1 : blocks;
}

K3Status k3_attention_plan(const K3AttentionShape *shape, K3AttentionPlan *plan)
{
  K3_TRY(check_shape(shape));
  plan->heads = shape->heads;
  plan->rows = shape->rows;
  plan->latent = shape->latent;
  plan->tile_rows = shape->tile_rows;
  plan->tuned = take_tuned(shape, plan);
  if (!plan->tuned) {
    choose_width(shape, plan);
    plan->slices = choose_slices(shape, plan);
  }
  plan->split = plan->slices > 1;
  plan->blocks = plan->passes * plan->slices;
  int64_t tiles = divide_up(shape->rows, shape->tile_rows);
  plan->busy_blocks = plan->passes * (tiles < plan->slices ? tiles : plan->slices);
  plan->acc_floats = plan->slices * plan->heads * plan->latent;
  plan->ml_floats = 2 * plan->slices * plan->heads;
  return K3_OK;
}

int64_t k3_attention_capacity(int64_t rows, int64_t limit)
{
  int64_t step = 64;
  while (16 * step <= rows) step *= 2;
  int64_t capacity = rows > 0 ? divide_up(rows, step) * step : step;
  if (capacity > limit) capacity = limit;
  return capacity < rows ? rows : capacity;
}
