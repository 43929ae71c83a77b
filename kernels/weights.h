/* Matrices and vectors on the device, and filling them. Layer: backend (CUDA).
 *
 * A matrix keeps as many bytes as are stored, in parts, so that 16-byte loads are aligned:
 *   f32, f16, bf16  values [rows][cols], row-major
 *   q8_0       codes int8 [rows][cols];            scale float16 [rows][cols/32]
 *   mxfp4      codes 16 bytes a block of 32;       scale E8M0 byte [rows][cols/32]
 *   iq1_s      codes and high in two records a block of 256, of 16 and 8 bytes each; scale float16 d [rows][cols/256].
 *              Block b of rows 8k … 8k + 7 stands at ((k * cols/256) + b) * 8 + row % 8: a warp reads eight rows at once.
 *              Record u has entries 2u and 2u + 1 of every sub-block of 32: byte 4q + 2h + l of its codes is qs of entry 2u + l of
 *              sub-block 4h + q. Word m of its high part is of q = 2m and 2m + 1: bits 8, 9, 10 of the index of the even one's byte
 *              i = 2h + l stand at 8i + 1, 8i + 3, 8i + 7, of the odd one's one bit lower. There too, of sub-blocks 4u + q: the scales
 *              at 4, 12, 13 and 20, 28, 29, delta's signs at 21 and 5.
 *   GGUF blocks: the parts of K3Format, one block's after another's
 * Each part starts at a multiple of 256 bytes in one allocation. Rows of several tensors that share an input stand best
 * in ONE matrix (q, k, v, g, f_a, b of a KDA layer; router, routed_down, shared gate, shared up): reserve all
 * rows, then fill at different row offsets.
 * Offsets are 64-bit: 448 experts of 768 x 3584 pass 2^31 bytes. */
#ifndef K3_KERNELS_WEIGHTS_H
#define K3_KERNELS_WEIGHTS_H

#include "kernels/launch.h"

#ifdef __cplusplus
extern "C" {
#endif
#include "plan/formats.h"
#include "plan/synth_values.h"

typedef struct {
  K3Type type;
  int64_t rows, cols;
  const void *codes;          /* values of the plain floats too */
  const void *high;           /* NULL where the format has no such part */
  const void *scale;          /* the same */
  const uint32_t *codebook;   /* iq1_s: see k3_cuda_codebook_pack; other formats: as k3_codebook_pack makes it */
} K3CudaMatrix;

enum { K3_CODEBOOK_ENTRIES = 2048 };

/* A vector as the kernels pass it on. `values` f32 [n]; when quantised also `codes`, two planes of signed bytes, high [n] and
 * low [n], and `scales` f32 [n/32]: x ≈ scale · (256 · high + low), see quantise.cuh. n is a multiple of 32 then. */
typedef struct {
  float *values;
  int8_t *codes;
  float *scales;
} K3CudaVector;

/* GGUF blocks, which the kernels of linear_blocks.cu and experts_blocks.cu multiply. */
static inline int k3_cuda_is_blocks(K3Type type)
{
  return k3_format_is_quantised(type) && type != K3_TYPE_Q8_0 && type != K3_TYPE_MXFP4 && type != K3_TYPE_IQ1_S;
}

/* Bytes of device memory for a matrix, and its parts within `memory` (256-byte aligned).
 * Errors of place: K3_ERR_INPUT when a row is no whole number of blocks. */
int64_t k3_cuda_matrix_bytes(K3Type type, int64_t rows, int64_t cols);
K3Status k3_cuda_matrix_place(K3Type type, int64_t rows, int64_t cols, void *memory, const uint32_t *codebook,
                              K3CudaMatrix *matrix);

/* Bytes that a pass over `rows` rows of the matrix reads. */
int64_t k3_cuda_matrix_read_bytes(const K3CudaMatrix *matrix, int64_t rows);

/* Blocks as stored, packed row-major in d_stored (device staging, 16-byte aligned), to rows [row, row + rows).
 * Errors: K3_ERR_INPUT (rows), K3_ERR_DEVICE. */
typedef struct {
  K3CudaMatrix matrix;
  int64_t row, rows;
  const void *d_stored;
} K3CudaRepack;
K3Status k3_cuda_repack(const K3CudaLaunch *launch, const K3CudaRepack *repack);

/* Makes a band of a synthetic tensor in place, equal byte for byte to k3_synth_fill of the whole and a cut.
 * Row r of the band (r = 0 … rows-1) goes to matrix row `row + r` and is the whole tensor's row
 *     first_row + (r / slab_rows) * slab_stride + r % slab_rows
 * (experts: slab_rows = the intermediate band, slab_stride = rows of an expert; plain: slab_rows = rows).
 * Columns first_col … first_col + matrix.cols of full_cols, both whole blocks. */
typedef struct {
  K3CudaMatrix matrix;
  K3SynthRule rule;
  int64_t row, rows;
  int64_t first_row, slab_rows, slab_stride;
  int64_t first_col, full_cols;
} K3CudaSynth;
K3Status k3_cuda_synth(const K3CudaLaunch *launch, const K3CudaSynth *synth);

/* iq1_s codebook: d_grid int8 [2048][8] of {-1, 0, 1} to d_packed uint16 [2048], 4-byte aligned: entry (i & 255) * 8 + i / 256 is of
 * index i; its nibble j names values j and 4 + j (entry_first of dot.cuh). */
K3Status k3_cuda_codebook_pack(const K3CudaLaunch *launch, const int8_t *d_grid, uint32_t *d_packed);

#ifdef __cplusplus
}
#endif
#endif
