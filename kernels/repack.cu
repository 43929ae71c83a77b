/* Filling matrices: from stored blocks, or from the synthetic recipe. See weights.h. Layer: backend (CUDA).
 *
 * Grid: a thread a block of the format (a value for plain floats), grid-stride. Bytes: read and written once. Bound: the
 * source of the data (HDF5, PCIe); the synthetic fill by 64-bit multiplications.
 * Twins: k3_synth_fill, k3_host_dequantise. Single precision here may not be contracted: products and sums that reach
 * a stored value are written with __fmul_rn and __fadd_rn, so that host and device make the same bytes. */
#include "kernels/weights.h"

#include "kernels/wait.cuh"

namespace {

enum { THREADS = 256 };

/* One block as stored, in registers, to its place; `at` = row * blocks of a row + block. */
__device__ __forceinline__ void put_q8_0(const K3CudaMatrix &m, int64_t at, const uint8_t *b)
{
  ((uint16_t *)m.scale)[at] = (uint16_t)(b[0] | b[1] << 8);
  uint32_t w[8];
#pragma unroll
  for (int i = 0; i < 8; i++)
    w[i] = b[2 + 4 * i] | b[3 + 4 * i] << 8 | b[4 + 4 * i] << 16 | (uint32_t)b[5 + 4 * i] << 24;
  uint4 *to = (uint4 *)m.codes + at * 2;
  to[0] = make_uint4(w[0], w[1], w[2], w[3]);
  to[1] = make_uint4(w[4], w[5], w[6], w[7]);
}

__device__ __forceinline__ void put_mxfp4(const K3CudaMatrix &m, int64_t at, const uint8_t *b)
{
  ((uint8_t *)m.scale)[at] = b[0];
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    w[i] = b[1 + 4 * i] | b[2 + 4 * i] << 8 | b[3 + 4 * i] << 16 | (uint32_t)b[4 + 4 * i] << 24;
  ((uint4 *)m.codes)[at] = make_uint4(w[0], w[1], w[2], w[3]);
}

/* Four entries' bits 8, 9, 10 of the index, three each, spread to bits 1, 3 and 7 of a byte each. */
__device__ __forceinline__ uint32_t iq1_s_spread(uint32_t bits)
{
  uint32_t r = 0;
#pragma unroll
  for (int l = 0; l < 4; l++) r |= ((bits >> (3 * l) & 1u) << 1 | (bits >> (3 * l) & 2u) << 2 | (bits >> (3 * l) & 4u) << 5) << (8 * l);
  return r;
}

/* The word of `high` of record u, sub-blocks 2m and 2m + 1 of both halves, in the order of weights.h; qh: of four halves' pairs. */
__device__ __forceinline__ uint32_t iq1_s_pair(const uint32_t qh[4], int u, int m)
{
  uint32_t own = qh[2 * u + m], r = (own >> 8 & 0x00100010u) | (own >> 1 & 0x30003000u) | (own >> 15 & 1u) << 21 | (own >> 31) << 5;
#pragma unroll
  for (int odd = 0; odd < 2; odd++) {
    int at = 16 * odd + 6 * u;
    r |= iq1_s_spread((qh[m] >> at & 63u) | (qh[2 + m] >> at & 63u) << 6) >> odd;
  }
  return r;
}

__device__ __forceinline__ void put_iq1_s(const K3CudaMatrix &m, int64_t at, const uint8_t *b)
{
  const int64_t blocks = m.cols / 256, row = at / blocks;
  at = ((row >> 3) * blocks + (at - row * blocks)) * 8 + (row & 7); /* weights.h */
  ((uint16_t *)m.scale)[at] = (uint16_t)(b[0] | b[1] << 8);
  uint32_t w[12];
#pragma unroll
  for (int i = 0; i < 12; i++)
    w[i] = b[2 + 4 * i] | b[3 + 4 * i] << 8 | b[4 + 4 * i] << 16 | (uint32_t)b[5 + 4 * i] << 24;
#pragma unroll
  for (int u = 0; u < 2; u++) {
    uint32_t codes[4];
#pragma unroll
    for (int q = 0; q < 4; q++) codes[q] = __byte_perm(w[q], w[4 + q], u ? 0x7632 : 0x5410);
    ((uint4 *)m.codes)[at * 2 + u] = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    ((uint2 *)m.high)[at * 2 + u] = make_uint2(iq1_s_pair(w + 8, u, 0), iq1_s_pair(w + 8, u, 1));
  }
}

/* Two bytes at `at` of block `block` of a GGUF format. */
__device__ __forceinline__ void put_half(const K3CudaMatrix &m, const K3Format &f, int64_t block, int at, uint16_t two)
{
  K3BlockPart part = f.scale;
  const void *base = m.scale;
  if (at >= f.codes.at && at < f.codes.at + f.codes.bytes) part = f.codes, base = m.codes;
  else if (at >= f.high.at && at < f.high.at + f.high.bytes) part = f.high, base = m.high;
  *(uint16_t *)((char *)base + block * part.bytes + (at - part.at)) = two;
}

template <int TYPE>
__device__ __forceinline__ void put(const K3CudaMatrix &m, int64_t at, const uint8_t *block)
{
  if (TYPE == K3_TYPE_Q8_0) put_q8_0(m, at, block);
  else if (TYPE == K3_TYPE_MXFP4) put_mxfp4(m, at, block);
  else put_iq1_s(m, at, block);
}

template <int TYPE, int BYTES>
__global__ void __launch_bounds__(THREADS) repack_kernel(K3CudaMatrix m, int64_t first, int64_t count, const uint8_t *stored)
{
  k3_wait();
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (int64_t)blockDim.x) {
    uint8_t block[BYTES];
#pragma unroll
    for (int k = 0; k < BYTES; k++) block[k] = stored[i * BYTES + k];
    put<TYPE>(m, first + i, block);
  }
}

/* GGUF blocks: two bytes a thread, each to its part. */
__global__ void __launch_bounds__(THREADS) repack_blocks_kernel(K3CudaMatrix m, K3Format f, int64_t first, int64_t count,
                                                                const uint16_t *stored)
{
  k3_wait();
  const int halves = (int)f.block_bytes / 2;
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count * halves; i += gridDim.x * (int64_t)blockDim.x) {
    int64_t block = i / halves;
    put_half(m, f, first + block, (int)(i - block * halves) * 2, stored[i]);
  }
}

/* Plain floats: 2 or 4 bytes a value. */
template <class Value>
__global__ void __launch_bounds__(THREADS) copy_kernel(K3CudaMatrix m, int64_t first, int64_t count, const Value *stored)
{
  k3_wait();
  Value *to = (Value *)m.codes + first;
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (int64_t)blockDim.x)
    to[i] = stored[i];
}

/* k3_synth_float without a fused multiply-add. */
__device__ __forceinline__ float synth_float(K3SynthRule rule, uint64_t index)
{
  float unit = __fmul_rn(1.7320508f, k3_synth_uniform(k3_synth_bits(rule.key, index)));
  return __fadd_rn(rule.mean, __fmul_rn(rule.deviation, unit));
}

template <int TYPE, int VALUES, int BYTES>
__global__ void __launch_bounds__(THREADS) synth_kernel(const __grid_constant__ K3CudaSynth s)
{
  k3_wait();
  int64_t row_blocks = s.matrix.cols / VALUES, full_blocks = s.full_cols / VALUES, first_block = s.first_col / VALUES;
  int64_t count = s.rows * row_blocks;
  for (int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; i < count; i += gridDim.x * (int64_t)blockDim.x) {
    int64_t row = i / row_blocks, column = i - row * row_blocks, slab = row / s.slab_rows;
    int64_t whole_row = s.first_row + slab * s.slab_stride + (row - slab * s.slab_rows);
    uint64_t index = (uint64_t)(whole_row * full_blocks + first_block + column);
    int64_t at = s.row * row_blocks + i;
    if (TYPE == K3_TYPE_F32) {
      ((float *)s.matrix.codes)[at] = synth_float(s.rule, index);
    } else if (TYPE == K3_TYPE_BF16) {
      ((uint16_t *)s.matrix.codes)[at] = k3_bf16_from_float(synth_float(s.rule, index));
    } else if (TYPE == K3_TYPE_F16) {
      ((uint16_t *)s.matrix.codes)[at] = k3_f16_from_float(synth_float(s.rule, index));
    } else {
      uint8_t block[BYTES];
      if (TYPE == K3_TYPE_Q8_0) k3_synth_q8_0(s.rule, index, block);
      else if (TYPE == K3_TYPE_MXFP4) k3_synth_mxfp4(s.rule, index, block);
      else k3_synth_iq1_s(s.rule, index, block);
      put<TYPE>(s.matrix, at, block);
    }
  }
}

/* The same of GGUF blocks: eight bytes a thread. */
__global__ void __launch_bounds__(THREADS) synth_blocks_kernel(const __grid_constant__ K3CudaSynth s, const __grid_constant__ K3Format f,
                                                               const __grid_constant__ K3SynthBlock shape)
{
  k3_wait();
  const int eights = (shape.bytes + 7) / 8;
  int64_t row_blocks = s.matrix.cols / f.block_values, full_blocks = s.full_cols / f.block_values;
  int64_t first_block = s.first_col / f.block_values, count = s.rows * row_blocks * eights;
  for (int64_t k = blockIdx.x * (int64_t)blockDim.x + threadIdx.x; k < count; k += gridDim.x * (int64_t)blockDim.x) {
    int64_t i = k / eights, row = i / row_blocks, column = i - row * row_blocks, slab = row / s.slab_rows;
    int64_t whole_row = s.first_row + slab * s.slab_stride + (row - slab * s.slab_rows);
    int from = (int)(k - i * eights) * 8;
    uint64_t bits = k3_synth_bytes(s.rule, shape, (uint64_t)(whole_row * full_blocks + first_block + column), from);
    for (int at = from; at < shape.bytes && at < from + 8; at += 2, bits >>= 16)
      put_half(s.matrix, f, s.row * row_blocks + i, at, (uint16_t)bits);
  }
}

__global__ void __launch_bounds__(THREADS) codebook_kernel(const int8_t *grid, uint16_t *packed)
{
  k3_wait();
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= K3_CODEBOOK_ENTRIES) return;
  uint32_t entry = 0;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    int pair = grid[i * 8 + j] + 1 + 3 * (grid[i * 8 + 4 + j] + 1);
    entry |= (uint32_t)(0x7654f3210ull >> (4 * pair) & 15) << (4 * j);
  }
  packed[(i & 255) << 3 | i >> 8] = (uint16_t)entry;
}

int64_t up256(int64_t bytes) { return (bytes + 255) / 256 * 256; }

/* Bytes of the parts of a matrix. */
struct PartBytes {
  int64_t codes, high, scale;
};

PartBytes part_bytes(K3Type type, int64_t rows, int64_t cols)
{
  const K3Format *f = k3_format(type);
  int64_t blocks = rows * cols / f->block_values;
  return PartBytes{blocks * f->codes.bytes, blocks * f->high.bytes, blocks * f->scale.bytes};
}

unsigned grid_of(const K3CudaLaunch *launch, int64_t count)
{
  int64_t blocks = (count + THREADS - 1) / THREADS, most = (int64_t)launch->sm_count * 16;
  return (unsigned)(blocks < 1 ? 1 : blocks < most ? blocks : most);
}

} /* namespace */

/* What a matrix takes: iq1_s stands in groups of eight rows. */
static PartBytes placed_bytes(K3Type type, int64_t rows, int64_t cols)
{
  return part_bytes(type, type == K3_TYPE_IQ1_S ? (rows + 7) / 8 * 8 : rows, cols);
}

int64_t k3_cuda_matrix_bytes(K3Type type, int64_t rows, int64_t cols)
{
  PartBytes p = placed_bytes(type, rows, cols);
  return up256(p.codes) + up256(p.high) + up256(p.scale);
}

int64_t k3_cuda_matrix_read_bytes(const K3CudaMatrix *matrix, int64_t rows)
{
  PartBytes p = part_bytes(matrix->type, rows, matrix->cols);
  return p.codes + p.high + p.scale;
}

K3Status k3_cuda_matrix_place(K3Type type, int64_t rows, int64_t cols, void *memory, const uint32_t *codebook,
                              K3CudaMatrix *matrix)
{
  if (rows < 1 || cols < 1 || cols % k3_format(type)->block_values)
    K3_FAIL(K3_ERR_INPUT, "a %s matrix of %lld x %lld on the device: rows must be whole blocks of %lld values",
            k3_format(type)->name, (long long)rows, (long long)cols, (long long)k3_format(type)->block_values);
  if ((uintptr_t)memory % 256)
    K3_FAIL(K3_ERR_INPUT, "device memory %p for a matrix is not aligned to 256 bytes", memory);
  PartBytes p = placed_bytes(type, rows, cols);
  matrix->type = type;
  matrix->rows = rows;
  matrix->cols = cols;
  matrix->codes = memory;
  matrix->high = p.high ? (char *)memory + up256(p.codes) : NULL;
  matrix->scale = p.scale ? (char *)memory + up256(p.codes) + up256(p.high) : NULL;
  matrix->codebook = codebook;
  return K3_OK;
}

K3Status k3_cuda_repack(const K3CudaLaunch *launch, const K3CudaRepack *repack)
{
  K3CudaMatrix m = repack->matrix;
  if (repack->row < 0 || repack->rows < 1 || repack->row + repack->rows > m.rows)
    K3_FAIL(K3_ERR_INPUT, "repack: rows %lld to %lld of a matrix of %lld", (long long)repack->row,
            (long long)(repack->row + repack->rows), (long long)m.rows);
  int64_t blocks = m.cols / k3_format(m.type)->block_values, first = repack->row * blocks, count = repack->rows * blocks;
  const void *stored = repack->d_stored;
  if (k3_cuda_is_blocks(m.type)) {
    K3Format f = *k3_format(m.type);
    void *block_arguments[] = {&m, &f, &first, &count, &stored};
    return k3_cuda_launch_kernel(launch, "repack_blocks_kernel", (const void *)repack_blocks_kernel,
                                 grid_of(launch, count * f.block_bytes / 2), THREADS, 1, 0, block_arguments);
  }
  void *arguments[] = {&m, &first, &count, &stored};
  const void *function = NULL;
  const char *name = "repack_kernel";
  switch (m.type) {
  case K3_TYPE_F32: function = (const void *)copy_kernel<uint32_t>; name = "copy_kernel"; break;
  case K3_TYPE_F16:
  case K3_TYPE_BF16: function = (const void *)copy_kernel<uint16_t>; name = "copy_kernel"; break;
  case K3_TYPE_Q8_0: function = (const void *)repack_kernel<K3_TYPE_Q8_0, 34>; break;
  case K3_TYPE_MXFP4: function = (const void *)repack_kernel<K3_TYPE_MXFP4, 17>; break;
  default: function = (const void *)repack_kernel<K3_TYPE_IQ1_S, 50>; break;
  }
  return k3_cuda_launch_kernel(launch, name, function, grid_of(launch, count), THREADS, 1, 0, arguments);
}

K3Status k3_cuda_synth(const K3CudaLaunch *launch, const K3CudaSynth *synth)
{
  K3CudaSynth s = *synth;
  int64_t values = k3_format(s.matrix.type)->block_values;
  if (s.row < 0 || s.rows < 1 || s.row + s.rows > s.matrix.rows || s.slab_rows < 1 || s.first_col % values ||
      s.full_cols % values || s.first_col + s.matrix.cols > s.full_cols)
    K3_FAIL(K3_ERR_INPUT, "synth: band of %lld rows at %lld, columns %lld + %lld of %lld, in a matrix of %lld rows",
            (long long)s.rows, (long long)s.row, (long long)s.first_col, (long long)s.matrix.cols,
            (long long)s.full_cols, (long long)s.matrix.rows);
  if (k3_cuda_is_blocks(s.matrix.type)) {
    K3Format f = *k3_format(s.matrix.type);
    K3SynthBlock shape = k3_synth_block_shape(s.matrix.type);
    void *block_arguments[] = {&s, &f, &shape};
    return k3_cuda_launch_kernel(launch, "synth_blocks_kernel", (const void *)synth_blocks_kernel,
                                 grid_of(launch, s.rows * s.matrix.cols / values), THREADS, 1, 0, block_arguments);
  }
  void *arguments[] = {&s};
  const void *function = NULL;
  switch (s.matrix.type) {
  case K3_TYPE_F32: function = (const void *)synth_kernel<K3_TYPE_F32, 1, 4>; break;
  case K3_TYPE_BF16: function = (const void *)synth_kernel<K3_TYPE_BF16, 1, 2>; break;
  case K3_TYPE_F16: function = (const void *)synth_kernel<K3_TYPE_F16, 1, 2>; break;
  case K3_TYPE_Q8_0: function = (const void *)synth_kernel<K3_TYPE_Q8_0, 32, 34>; break;
  case K3_TYPE_MXFP4: function = (const void *)synth_kernel<K3_TYPE_MXFP4, 32, 17>; break;
  default: function = (const void *)synth_kernel<K3_TYPE_IQ1_S, 256, 50>; break;
  }
  return k3_cuda_launch_kernel(launch, "synth_kernel", function, grid_of(launch, s.rows * s.matrix.cols / values), THREADS,
                               1, 0, arguments);
}

K3Status k3_cuda_codebook_pack(const K3CudaLaunch *launch, const int8_t *d_grid, uint32_t *d_packed)
{
  void *arguments[] = {&d_grid, &d_packed};
  return k3_cuda_launch_kernel(launch, "codebook_kernel", (const void *)codebook_kernel,
                               K3_CODEBOOK_ENTRIES / THREADS, THREADS, 1, 0, arguments);
}
