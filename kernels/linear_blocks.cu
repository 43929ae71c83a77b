/* Products with one matrix of GGUF blocks. See linear.h, blocks.cuh. Layer: backend (CUDA).
 *
 * Grid: one block a multiprocessor, 512 threads; a block takes an even share of the pairs of rows. Reads: every weight once, the
 * input once a block (L2). Bound: memory, for the formats with a codebook its look-ups in shared memory.
 * Twin: k3_host_matvec. */
#include "kernels/blocks.cuh"
#include "kernels/linear.h"
#include "plan/codebook.h"

namespace {

using namespace k3;

struct Arguments {
  K3CudaInput input;
  BlockPlan plan;
  BlockMatrix blocks;
  K3Type type;
  const uint32_t *book;
  float *y;
  int add, rows;
};

/* Pair i: rows 2i and 2i + 1. */
struct RowMap {
  const BlockMatrix blocks;
  int row_blocks, rows;
  __device__ __forceinline__ void place(int pair, int block, K3BlockParts parts[2]) const
  {
    uint32_t first = (uint32_t)(2 * pair) * row_blocks + block;
    parts[0] = blocks.place(first);
    parts[1] = blocks.place(2 * pair + 1 < rows ? first + row_blocks : first);
  }
};

template <int TYPE, bool EXACT>
__global__ void __launch_bounds__(BLOCK_THREADS, 1) linear_blocks_kernel(const __grid_constant__ Arguments a)
{
  extern __shared__ __align__(128) char memory[];
  __shared__ float scratch[33];
  BlockShared s = block_shared(memory, a.plan);
  fill_book<TYPE>(s, a.plan, a.book);
  unsigned pairs = (unsigned)(a.rows + 1) / 2;
  int begin = (int)((uint64_t)pairs * blockIdx.x / gridDim.x), end = (int)((uint64_t)pairs * (blockIdx.x + 1) / gridDim.x);
  BlockPairs<TYPE, EXACT, RowMap> core(RowMap{a.blocks, a.plan.tiling.pieces >> a.blocks.units_log, a.rows}, a.type, a.blocks.units_log,
                                         a.plan.tiling, begin, end);
  core.s_grid_words = a.plan.grid_words;
  core.preload();
  k3_wait_early();
  fill_input(a.input, s.in, scratch);
  if (EXACT) __syncthreads();
  else fill_sums(s, type_of<TYPE>(a.type), (int)a.input.n);
  core.run(s);
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * (end - begin); i += blockDim.x) {
    int row = 2 * begin + i;
    if (row >= a.rows) break;
    float2 sums = core.pair_sum(s, i >> 1);
    float sum = i & 1 ? sums.y : sums.x;
    a.y[row] = a.add ? sum + __ldcg(a.y + row) : sum;
  }
}

const void *kernel_of(K3Type type, int exact, int *templated)
{
  *templated = !exact;
  if (exact) return (const void *)linear_blocks_kernel<BLOCK_ANY, true>;
  switch (type) {
  case K3_TYPE_Q2_K: return (const void *)linear_blocks_kernel<K3_TYPE_Q2_K, false>;
  case K3_TYPE_Q3_K: return (const void *)linear_blocks_kernel<K3_TYPE_Q3_K, false>;
  case K3_TYPE_Q4_K: return (const void *)linear_blocks_kernel<K3_TYPE_Q4_K, false>;
  case K3_TYPE_Q5_K: return (const void *)linear_blocks_kernel<K3_TYPE_Q5_K, false>;
  case K3_TYPE_Q6_K: return (const void *)linear_blocks_kernel<K3_TYPE_Q6_K, false>;
  case K3_TYPE_IQ4_XS: return (const void *)linear_blocks_kernel<K3_TYPE_IQ4_XS, false>;
  default: *templated = 0; return (const void *)linear_blocks_kernel<BLOCK_ANY, false>;
  }
}

} /* namespace */

K3Status k3_cuda_linear_blocks(const K3CudaLaunch *launch, const K3CudaInput *input, const K3CudaLinearItem *item, int exact)
{
  const K3CudaMatrix *m = &item->matrix;
  if (m->cols != input->n || m->rows < 1 || m->rows > INT32_MAX / 2)
    K3_FAIL(K3_ERR_INPUT, "linear: a matrix of layer %lld, phase %s is %lld x %lld and meets a vector of %lld",
            (long long)launch->layer, launch->phase, (long long)m->rows, (long long)m->cols, (long long)input->n);
  int id = k3_codebook_of(m->type), templated;
  const K3Codebook *book = id < 0 ? NULL : k3_codebook((K3CodebookId)id);
  const void *function = kernel_of(m->type, exact, &templated);
  unsigned grid = (unsigned)launch->sm_count;
  Arguments a;
  Tiling tiling = block_tiling((int)(m->cols / block_unit_values(m->type)));
  a.plan = block_plan(m->type, templated, input->n, exact, book ? book->words : 0, book ? k3_codebook_words(book) - book->words : 0,
                      block_segment_floats((int)((m->rows + 1) / 2 / grid) + 2, tiling.lanes, BLOCK_THREADS / 32));
  a.plan.tiling = tiling;
  a.input = *input;
  a.blocks = block_matrix(*m);
  a.type = m->type;
  a.book = m->codebook;
  a.y = item->y;
  a.add = item->add;
  a.rows = (int)m->rows;
  void *arguments[] = {&a};
  return k3_cuda_launch_kernel(launch, "linear_blocks_kernel", function, grid, BLOCK_THREADS, 1, (size_t)a.plan.bytes, arguments);
}
