/* kernel_check: a layer's kernels in a chain, timed with each left out, tuned, and compared bit for bit with and without
 * dependent launch. */
#include "kernels/experts.h"
#include "kernels/norm.h"
#include "tests/kernel_device.h"

enum { CHAIN_LAYERS = 6 };
typedef struct {
  K3CudaNorm norm[2];
  K3CudaLinear in, out, moe, routed_up;
  K3CudaExperts experts;
} ChainLayer;
typedef struct {
  ChainLayer layer[CHAIN_LAYERS];
  int mask; /* kernels left out */
} Chain;

static K3Status work_chain(void *context, const K3CudaLaunch *launch, int set)
{
  const Chain *chain = (const Chain *)context;
  const ChainLayer *l = &chain->layer[set];
  if (!(chain->mask & 1)) K3_TRY(k3_cuda_norm(launch, &l->norm[0]));
  if (!(chain->mask & 2)) K3_TRY(k3_cuda_linear(launch, &l->in));
  if (!(chain->mask & 4)) K3_TRY(k3_cuda_linear(launch, &l->out));
  if (!(chain->mask & 8)) K3_TRY(k3_cuda_norm(launch, &l->norm[1]));
  if (!(chain->mask & 16)) K3_TRY(k3_cuda_linear(launch, &l->moe));
  if (!(chain->mask & 32)) K3_TRY(k3_cuda_experts(launch, &l->experts));
  if (!(chain->mask & 64)) K3_TRY(k3_cuda_linear(launch, &l->routed_up));
  return K3_OK;
}

/* The tuning fields of a layer's launches. */
enum { KNOBS = 4 * 2 };
static int *knob(ChainLayer *l, int which)
{
  K3CudaLinear *linear[4] = {&l->in, &l->out, &l->moe, &l->routed_up};
  return which % 2 == 0 ? &linear[which / 2]->blocks_per_sm : &linear[which / 2]->threads;
}

static void set_knob(Chain *chain, int which, int value)
{
  for (int s = 0; s < CHAIN_LAYERS; s++) *knob(&chain->layer[s], which) = value;
}

/* One knob after the other, twice: the value with the fastest chain stays. */
static void tune_chain(K3Table *table, Chain *chain)
{
  static const char *names[4] = {"in", "o_proj", "moe", "routed_up"};
  static const int values[2][4] = {{1, 2, -1}, {416, 352, 256, -1}};
  int pdl = table->pdl;
  table->pdl = 1;
  for (int which = 0; which < KNOBS; which++) set_knob(chain, which, values[which % 2][which % 2]);
  printf("\n# tuning of the chain, dependent launch: us for each value\n");
  for (int round = 0; round < 2; round++)
    for (int which = 0; which < KNOBS; which++) {
      const int *choices = values[which % 2];
      double best = INFINITY;
      int chosen = 0;
      printf("%9s %-9s", names[which / 2], which % 2 ? "threads" : "blocks");
      for (int c = 0; choices[c] >= 0; c++) {
        set_knob(chain, which, choices[c]);
        double us = k3_table_microseconds(table, work_chain, chain, CHAIN_LAYERS, CHAIN_LAYERS * 4);
        printf(" %6d: %6.2f", choices[c], us);
        if (us < best) best = us, chosen = choices[c];
      }
      set_knob(chain, which, chosen);
      printf("  -> %d\n", chosen);
    }
  table->pdl = pdl;
}

/* Outputs of a run over all layers, from the same start: with dependent launch every bit must be as without. */
typedef struct {
  float *branch, *p, *z, *hidden;
  K3CudaVector x;
  const float *start;
} ChainState;

static float *run_chain(K3Table *table, Chain *chain, const ChainState *state, int pdl)
{
  enum { H = 7168, L = 3584 };
  K3CudaLaunch launch;
  K3_CHECK_STATUS(k3_cuda_launch_init(check_stream, pdl, &launch));
  K3_CHECK_CUDA(cudaMemcpy(state->branch, state->start, H * 4, cudaMemcpyHostToDevice));
  K3_CHECK_CUDA(cudaMemcpy(state->p, state->start + H, H * 4, cudaMemcpyHostToDevice));
  K3_CHECK_CUDA(cudaMemset(state->z, 0xff, L * 4));
  K3_CHECK_CUDA(cudaMemset(state->x.values, 0xff, H * 4));
  K3_CHECK_CUDA(cudaDeviceSynchronize());
  for (int round = 0; round < 5; round++)
    for (int s = 0; s < CHAIN_LAYERS; s++) K3_CHECK_STATUS(work_chain(chain, &launch, s));
  float *all = (float *)malloc((3 * H + L) * 4);
  K3_CHECK_CUDA(cudaDeviceSynchronize());
  K3_CHECK_CUDA(cudaMemcpy(all, state->branch, H * 4, cudaMemcpyDeviceToHost));
  K3_CHECK_CUDA(cudaMemcpy(all + H, state->p, H * 4, cudaMemcpyDeviceToHost));
  K3_CHECK_CUDA(cudaMemcpy(all + 2 * H, state->x.values, H * 4, cudaMemcpyDeviceToHost));
  K3_CHECK_CUDA(cudaMemcpy(all + 3 * H, state->z, L * 4, cudaMemcpyDeviceToHost));
  (void)table;
  return all;
}

static void check_chain(K3Table *table, Chain *chain, const ChainState *state)
{
  enum { H = 7168, L = 3584 };
  float *plain = run_chain(table, chain, state, 0), *start = (float *)state->start;
  int64_t wrong = 0, control = 0, nan = 0;
  for (int t = 0; t < 10; t++) {
    float *dependent = run_chain(table, chain, state, 1);
    for (int i = 0; i < 3 * H + L; i++) wrong += memcmp(&plain[i], &dependent[i], 4) != 0;
    free(dependent);
  }
  for (int i = 0; i < 3 * H + L; i++) nan += plain[i] != plain[i];
  for (int i = 0; i < H; i++) start[i] += 1.0f;
  float *other = run_chain(table, chain, state, 1);
  for (int i = 0; i < 3 * H + L; i++) control += memcmp(&plain[i], &other[i], 4) != 0;
  K3CudaUse use = {"chain", 0, 0, 0, 0, 0, 0, 0};
  k3_table_row(table, "pdl against plain, wrong + NaN", (double)(wrong + nan), 0, (double)control, &use, 0, 0);
  free(plain), free(other);
}

/* Norm, KDA projections, (no attention), o_proj, norm, MoE: one rank of eight, collectives and attention left out. */
void time_chain(K3Table *table, int tune)
{
  enum { H = 7168, L = 3584, BAND = 768, LOCAL = 448, SHARED = 768 };
  Chain *chain = (Chain *)calloc(1, sizeof *chain);
  float *random = k3_table_floats(table, 9 * H, 1.0);
  float *mixed = (float *)k3_table_upload(random + 2 * H, H * 4), *mix = (float *)k3_table_upload(random + 3 * H, K3_NORM_MIX * 4);
  float *p = (float *)k3_table_upload(random, H * 4);
  float *small = k3_table_floats(table, H, 0.5 / sqrt((double)H)), *score = (float *)k3_table_upload(small, H * 4), *norm = (float *)k3_table_upload(random + H, H * 4);
  float *branch = (float *)k3_table_upload(random, H * 4), *projected = (float *)k3_table_poisoned(8192 * 4);
  float *moe = (float *)k3_table_poisoned(4096 * 4), *logits = (float *)k3_table_upload(random, 896 * 4);
  float *latent = (float *)k3_table_upload(random, L * 4), *z = (float *)k3_table_upload(random, L * 4);
  float *bias = (float *)k3_table_upload(random + 2000, 896 * 4), *hidden = (float *)k3_table_poisoned(16 * BAND * 4);
  float *weights = (float *)k3_table_poisoned(64);
  int32_t *ids = (int32_t *)k3_table_poisoned(64);
  uint32_t *meeting = (uint32_t *)k3_table_poisoned(k3_cuda_meeting_bytes(16, BAND, L));
  int64_t bytes = 0;
  K3CudaVector x = {(float *)k3_table_poisoned(H * 4), (int8_t *)k3_table_poisoned(2 * H), (float *)k3_table_poisoned(H / 8)};
  for (int s = 0; s < CHAIN_LAYERS; s++) {
    ChainLayer *l = &chain->layer[s];
    for (int k = 0; k < 2; k++) {
      K3CudaNorm *a = &l->norm[k];
      a->n = H, a->mixed = mixed, a->mix = mix, a->p = p, a->branch = branch, a->replace = 1, a->early = 1;
      a->score = score, a->norm = norm, a->res_eps = a->eps = 1e-5f, a->x = x;
    }
    l->in.input.n = H, l->in.input.vector = x, l->in.count = 1;
    l->in.items[0].matrix = synth_matrix(Q8, 6284, H, fresh_rule(table, H));
    l->in.items[0].y = projected;
    l->out.input.kind = K3_INPUT_VALUES, l->out.input.n = 1536, l->out.input.vector.values = projected, l->out.count = 1;
    l->out.items[0].matrix = synth_matrix(Q8, H, 1536, fresh_rule(table, 1536));
    l->out.items[0].y = branch;
    l->moe.input.n = H, l->moe.input.vector = x, l->moe.count = 1;
    l->moe.items[0].matrix = synth_matrix(Q8, 2096, H, fresh_rule(table, H));
    l->moe.items[0].y = moe;
    K3CudaExperts *g = &l->experts;
    g->y.kind = K3_INPUT_VALUES, g->y.n = L, g->y.vector.values = latent;
    g->gate = synth_matrix(K3_TYPE_IQ1_S, LOCAL * BAND, L, fresh_rule(table, L));
    g->up = synth_matrix(K3_TYPE_IQ1_S, LOCAL * BAND, L, fresh_rule(table, L));
    g->local = LOCAL, g->band = BAND, g->ids = ids, g->weights = weights, g->hidden = hidden;
    g->routing.experts = 896, g->routing.chosen = 16, g->routing.logits = logits, g->routing.bias = bias;
    g->routing.scaling = 1, g->routing.renormalize = 1, g->situ_beta = 4, g->situ_linear_beta = 25;
    g->down = synth_matrix(K3_TYPE_IQ1_S, LOCAL * L, BAND, fresh_rule(table, BAND)), g->z = z, g->meeting = meeting;
    g->shared.matrix = synth_matrix(Q8, H, SHARED, fresh_rule(table, SHARED)), g->shared.y = branch;
    g->shared_input.kind = K3_INPUT_SITU, g->shared_input.n = SHARED, g->shared_input.vector.values = moe + 560;
    g->shared_input.up = moe + 560 + 768, g->shared_input.situ_beta = 4, g->shared_input.situ_linear_beta = 25;
    l->routed_up.input.kind = K3_INPUT_RMS, l->routed_up.input.n = 448, l->routed_up.input.full = L;
    l->routed_up.input.vector.values = z, l->routed_up.input.norm = norm, l->routed_up.input.eps = 1e-5f;
    l->routed_up.count = 1, l->routed_up.items[0].add = 1, l->routed_up.items[0].y = branch;
    l->routed_up.items[0].matrix = synth_matrix(Q8, H, 448, fresh_rule(table, 448));
    if (s == 0) {
      bytes = k3_cuda_linear_bytes(&l->in) + k3_cuda_linear_bytes(&l->out) + k3_cuda_linear_bytes(&l->moe) +
              k3_cuda_linear_bytes(&l->routed_up) + k3_cuda_matrix_read_bytes(&g->shared.matrix, H);
    }
  }
  static const char *names[7] = {"norm", "kda in", "o_proj", "norm", "moe in", "experts", "routed_up"};
  int pdl = table->pdl, here = 0;
  double whole[2];
  if (tune) tune_chain(table, chain);
  for (table->pdl = 0; table->pdl < 2; table->pdl++) whole[table->pdl] = k3_table_microseconds(table, work_chain, chain, CHAIN_LAYERS, CHAIN_LAYERS * 4);
  int32_t *chosen = (int32_t *)k3_table_download(ids, 64);
  for (int k = 0; k < 16; k++) here += chosen[k] >= 0 && chosen[k] < LOCAL;
  bytes += here * (2 * k3_cuda_matrix_read_bytes(&chain->layer[0].experts.gate, BAND) +
                   k3_cuda_matrix_read_bytes(&chain->layer[0].experts.down, L));
  printf("\n# chain of 7 kernels a layer (KDA projections, MoE with %d local experts; no attention, no collectives), %.1f MB\n",
         here, (double)bytes * 1e-6);
  printf("%-22s %10s %10s\n", "", "plain us", "pdl us");
  printf("%-22s %10.2f %10.2f   (floor %.2f at 4.5 TB/s)\n", "whole", whole[0], whole[1], (double)bytes / 4.5e6);
  for (int k = 0; k < 7; k++) {
    double without[2];
    chain->mask = 1 << k;
    for (table->pdl = 0; table->pdl < 2; table->pdl++)
      without[table->pdl] = k3_table_microseconds(table, work_chain, chain, CHAIN_LAYERS, CHAIN_LAYERS * 4);
    printf("%-22s %10.2f %10.2f   (difference when left out)\n", names[k], whole[0] - without[0], whole[1] - without[1]);
  }
  table->pdl = pdl;
  ChainState state = {branch, p, z, hidden, x, random};
  chain->mask = 0;
  check_chain(table, chain, &state);
  free(random), free(small), free(chosen), free(chain);
}
