/* See attention_schedule.h. Layer: tests. */
#include "attention_schedule.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "plan/attention.h"

enum { MERGE_SUMS = 16 }; /* parts that the merge has in flight */

/* Four floats in a register, without letting the compiler reorder the sums (GCC's and clang's vector extension). */
typedef float Four __attribute__((vector_size(16)));

static inline Four load_four(const float *from)
{
  Four four;
  memcpy(&four, from, sizeof four);
  return four;
}

static inline void store_four(float *to, Four four) { memcpy(to, &four, sizeof four); }

static inline Four four_of(float x) { return (Four){x, x, x, x}; }

/* Σ a·b as a warp adds it up: 32 lanes, each every 32nd element, then halving. */
static float dot(const float *a, const float *b, int64_t count)
{
  Four s[8];
  float lane[32];
  Four s0 = four_of(0.0f), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0, s6 = s0, s7 = s0;
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    s0 += load_four(a + i) * load_four(b + i);
    s1 += load_four(a + i + 4) * load_four(b + i + 4);
    s2 += load_four(a + i + 8) * load_four(b + i + 8);
    s3 += load_four(a + i + 12) * load_four(b + i + 12);
    s4 += load_four(a + i + 16) * load_four(b + i + 16);
    s5 += load_four(a + i + 20) * load_four(b + i + 20);
    s6 += load_four(a + i + 24) * load_four(b + i + 24);
    s7 += load_four(a + i + 28) * load_four(b + i + 28);
  }
  s[0] = s0, s[1] = s1, s[2] = s2, s[3] = s3, s[4] = s4, s[5] = s5, s[6] = s6, s[7] = s7;
  memcpy(lane, s, sizeof lane);
  for (int j = 0; i < count; i++, j++) lane[j] += a[i] * b[i];
  for (int half = 16; half > 0; half /= 2)
    for (int j = 0; j < half; j++) lane[j] += lane[j + half];
  return lane[0];
}

/* acc = acc · keep + Σ p_t c_t over one tile, step by step. tile [valid, width]. */
static void add_tile(float *acc, const float *tile, const float *p, float keep, int64_t valid, int64_t step,
                     int64_t latent, int64_t width)
{
  int64_t c = 0;
  for (; c + 16 <= latent; c += 16) {
    Four a0 = load_four(acc + c) * four_of(keep), a1 = load_four(acc + c + 4) * four_of(keep);
    Four a2 = load_four(acc + c + 8) * four_of(keep), a3 = load_four(acc + c + 12) * four_of(keep);
    for (int64_t t = 0; t < valid; t += step) {
      const float *row = tile + t * width + c;
      Four weight = four_of(p[t]);
      Four s0 = weight * load_four(row), s1 = weight * load_four(row + 4);
      Four s2 = weight * load_four(row + 8), s3 = weight * load_four(row + 12);
      int64_t end = t + step < valid ? t + step : valid;
      for (int64_t u = t + 1; u < end; u++) {
        row += width;
        weight = four_of(p[u]);
        s0 += weight * load_four(row), s1 += weight * load_four(row + 4);
        s2 += weight * load_four(row + 8), s3 += weight * load_four(row + 12);
      }
      a0 += s0, a1 += s1, a2 += s2, a3 += s3;
    }
    store_four(acc + c, a0), store_four(acc + c + 4, a1);
    store_four(acc + c + 8, a2), store_four(acc + c + 12, a3);
  }
  for (; c < latent; c++) {
    float a = acc[c] * keep;
    for (int64_t t = 0; t < valid; t += step) {
      int64_t end = t + step < valid ? t + step : valid;
      float sum = p[t] * tile[t * width + c];
      for (int64_t u = t + 1; u < end; u++) sum += p[u] * tile[u * width + c];
      a += sum;
    }
    acc[c] = a;
  }
}

static int is_chosen(const K3Schedule *s, int64_t head) { return !s->chosen || s->chosen[head]; }

static int64_t slice_rows(const K3Schedule *s, int64_t slice)
{
  return k3_attention_slice_begin(s->rows, s->tile_rows, s->slices, slice + 1) -
         k3_attention_slice_begin(s->rows, s->tile_rows, s->slices, slice);
}

/* One block of the grid: rows begin … end of heads first … last. */
static void run_block(const K3Schedule *s, int64_t slice, int64_t first, int64_t last, int64_t begin, int64_t end,
                      const K3Partials *partials)
{
  int64_t width = s->latent + s->rope;
  float p[s->tile_rows], scale_log2 = (float)(s->scale * 1.4426950408889634);
  for (int64_t h = first; h < last; h++) {
    if (!is_chosen(s, h)) continue;
    partials->m[slice * s->heads + h] = K3_SCHEDULE_EMPTY_M;
    partials->l[slice * s->heads + h] = 0.0f;
    memset(partials->acc + (slice * s->heads + h) * s->latent, 0, (size_t)s->latent * sizeof(float));
  }
  for (int64_t row = begin; row < end; row += s->tile_rows) {
    int64_t valid = end - row < s->tile_rows ? end - row : s->tile_rows;
    const float *tile = s->cache + row * width;
    for (int64_t h = first; h < last; h++) { /* the tile, once read, serves all heads of the pass */
      if (!is_chosen(s, h)) continue;
      float *m = partials->m + slice * s->heads + h, *l = partials->l + slice * s->heads + h;
      float top = *m, sum = 0.0f;
      for (int64_t t = 0; t < valid; t++) {
        p[t] = dot(s->query + h * width, tile + t * width, width) * scale_log2;
        top = fmaxf(top, p[t]);
      }
      for (int64_t t = 0; t < valid; t++) {
        p[t] = exp2f(p[t] - top);
        sum += p[t];
      }
      float keep = exp2f(*m - top);
      *l = *l * keep + sum;
      *m = top;
      add_tile(partials->acc + (slice * s->heads + h) * s->latent, tile, p, keep, valid, s->step_rows, s->latent,
               width);
    }
  }
}

void k3_schedule_slices(const K3Schedule *s, K3Fault fault, const K3Partials *partials)
{
  int64_t passes = (s->heads + s->heads_per_pass - 1) / s->heads_per_pass;
#pragma omp parallel for schedule(dynamic)
  for (int64_t block = 0; block < passes * s->slices; block++) {
    int64_t slice = block / passes, first = block % passes * s->heads_per_pass;
    int64_t last = first + s->heads_per_pass < s->heads ? first + s->heads_per_pass : s->heads;
    int64_t begin = k3_attention_slice_begin(s->rows, s->tile_rows, s->slices, slice);
    int64_t end = k3_attention_slice_begin(s->rows, s->tile_rows, s->slices, slice + 1);
    if (begin == end && fault.kind == K3_FAULT_EMPTY_UNWRITTEN) continue;
    if (slice == fault.slice) {
      if (fault.kind == K3_FAULT_SLICE_UNWRITTEN) continue;
      if (fault.kind == K3_FAULT_SLICE_BEGINS_LATE) begin++;
      if (fault.kind == K3_FAULT_SLICE_ENDS_LATE) end < s->rows ? end++ : begin--;
    }
    run_block(s, slice, first, last, begin, end, partials);
  }
}

/* out [v] = W_v of `head` times mean [C]. */
static void apply_w_v(const K3Schedule *s, int64_t head, const float *mean, float *out)
{
  for (int64_t j = 0; j < s->v_head; j++) out[j] = dot(s->w_v + (head * s->v_head + j) * s->latent, mean, s->latent);
}

/* The planted mistake: nothing says how much a slice weighs once its mean has gone through W_v. */
static void merge_after_w_v(const K3Schedule *s, const K3Partials *partials, int64_t head, float *out)
{
  float mean[s->latent], part[s->v_head];
  int64_t with_rows = 0;
  memset(out, 0, (size_t)s->v_head * sizeof(float));
  for (int64_t i = 0; i < s->slices; i++) {
    if (slice_rows(s, i) == 0) continue;
    const float *acc = partials->acc + (i * s->heads + head) * s->latent;
    for (int64_t c = 0; c < s->latent; c++) mean[c] = acc[c] / partials->l[i * s->heads + head];
    apply_w_v(s, head, mean, part);
    for (int64_t j = 0; j < s->v_head; j++) out[j] += part[j];
    with_rows++;
  }
  for (int64_t j = 0; j < s->v_head && with_rows > 0; j++) out[j] /= (float)with_rows;
}

static void merge_head(const K3Schedule *s, K3Fault fault, const K3Partials *partials, int64_t head, float *out)
{
  int64_t parts = s->slices;
  int scaled = fault.kind != K3_FAULT_MERGE_UNSCALED;
  float top = K3_SCHEDULE_EMPTY_M, total, mean[s->latent], lane[32] = {0.0f};
  for (int64_t i = 0; i < parts; i++) top = fmaxf(top, partials->m[i * s->heads + head]);
  for (int64_t i = 0; i < parts; i++) {
    float weight = scaled ? exp2f(partials->m[i * s->heads + head] - top) : 1.0f;
    lane[i % 32] += partials->l[i * s->heads + head] * weight;
  }
  for (int half = 16; half > 0; half /= 2)
    for (int j = 0; j < half; j++) lane[j] += lane[j + half];
  total = lane[0];

  float sums[MERGE_SUMS][s->latent];
  memset(sums, 0, sizeof sums);
  for (int64_t i = 0; i < parts; i++) {
    const float *acc = partials->acc + (i * s->heads + head) * s->latent;
    float weight = scaled ? exp2f(partials->m[i * s->heads + head] - top) : 1.0f, *sum = sums[i % MERGE_SUMS];
    for (int64_t c = 0; c < s->latent; c++) sum[c] += acc[c] * weight;
  }
  float inverse = total == 0.0f ? 0.0f : 1.0f / total; /* no rows at all: 0; NaN stays NaN */
  for (int64_t c = 0; c < s->latent; c++) {
    float sum = 0.0f;
    for (int i = 0; i < MERGE_SUMS; i += 2) sum += sums[i][c] + sums[i + 1][c];
    mean[c] = sum * inverse;
  }
  apply_w_v(s, head, mean, out);
}

void k3_schedule_merge(const K3Schedule *s, K3Fault fault, const K3Partials *partials, float *out)
{
#pragma omp parallel for schedule(dynamic)
  for (int64_t h = 0; h < s->heads; h++) {
    if (!is_chosen(s, h)) continue;
    if (fault.kind == K3_FAULT_W_V_FIRST) merge_after_w_v(s, partials, h, out + h * s->v_head);
    else merge_head(s, fault, partials, h, out + h * s->v_head);
  }
}

static double dot_exact(const float *a, const float *b, int64_t count)
{
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; i++) sum += (double)a[i] * (double)b[i];
  return sum;
}

void k3_schedule_reference(const K3Schedule *s, int64_t head, int64_t v_begin, int64_t v_count, double *out,
                           double *top)
{
  int64_t width = s->latent + s->rope;
  const float *w_v = s->w_v + (head * s->v_head + v_begin) * s->latent;
  double *score = malloc((size_t)(s->rows + 1) * sizeof *score), largest = -INFINITY, magnitude = 0.0, total = 0.0;
  if (!score) abort();
  for (int64_t t = 0; t < s->rows; t++) {
    score[t] = s->scale * dot_exact(s->query + head * width, s->cache + t * width, width);
    largest = fmax(largest, score[t]);
    magnitude = fmax(magnitude, fabs(score[t]));
  }
  for (int64_t j = 0; j < v_count; j++) out[j] = 0.0;
  for (int64_t t = 0; t < s->rows; t++) {
    double weight = exp(score[t] - largest);
    total += weight;
    for (int64_t j = 0; j < v_count; j++)
      out[j] += weight * dot_exact(w_v + j * s->latent, s->cache + t * width, s->latent);
  }
  for (int64_t j = 0; j < v_count && s->rows > 0; j++) out[j] /= total;
  if (top) *top = magnitude;
  free(score);
}
