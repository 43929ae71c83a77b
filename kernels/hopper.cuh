/* PTX of Hopper: mbarriers, bulk tensor copies, warpgroup products. Layer: backend (CUDA), device code, sm_90a.
 * Source: PTX ISA, "mbarrier", "cp.async.bulk", "wgmma". */
#ifndef K3_KERNELS_HOPPER_CUH
#define K3_KERNELS_HOPPER_CUH

#include <cuda.h>
#include <stdint.h>

static __device__ __forceinline__ uint32_t shared_address(const void *pointer)
{
  return (uint32_t)__cvta_generic_to_shared(pointer);
}

static __device__ __forceinline__ void store_shared(uint32_t address, float value)
{
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

static __device__ __forceinline__ float2 load_shared(uint32_t address)
{
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
  return value;
}

/* 16 bytes of zeros. */
static __device__ __forceinline__ void clear_shared(uint32_t address)
{
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
}

/* --- mbarriers: phases alternate 0, 1, 0 … --- */

static __device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t count)
{
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

/* Makes inits visible to the copy engine and to the other blocks of the cluster. */
static __device__ __forceinline__ void barrier_init_fence()
{
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

static __device__ __forceinline__ void barrier_arrive(uint32_t barrier)
{
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* The same barrier of block `rank` of the cluster. No .release.cluster here: it costs a fence of the whole GPU (about a
 * microsecond under load), and what is given back is memory that was only read. */
static __device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t rank)
{
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier), "r"(rank)
      : "memory");
}

static __device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes)
{
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

static __device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t phase)
{
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again; }" ::"r"(barrier), "r"(phase)
      : "memory");
}

/* Threads of a group of warps meet; `id` 1 … 15. */
static __device__ __forceinline__ void group_sync(int id, int threads)
{
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/* The blocks of a cluster meet. Relaxed, for the cost of a release (above): it orders starts and ends of blocks; data go
 * by send_to or bulk copies, which complete on a barrier of the receiver. */
static __device__ __forceinline__ void cluster_arrive()
{
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

static __device__ __forceinline__ void cluster_wait()
{
  __syncwarp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

/* `value` to the variable at `mine` of block `rank`; 4 bytes complete on that block's `barrier`. */
static __device__ __forceinline__ void send_to(float *mine, uint32_t barrier, uint32_t rank, float value)
{
  asm volatile(
      "{ .reg .b32 there, done; mapa.shared::cluster.u32 there, %0, %2; mapa.shared::cluster.u32 done, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [there], %3, [done]; }" ::"r"(shared_address(mine)),
      "r"(barrier), "r"(rank), "r"(__float_as_uint(value))
      : "memory");
}

/* Ordinary stores to shared memory before; reads by wgmma or the copy engine after the next barrier. */
static __device__ __forceinline__ void fence_async_shared()
{
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* --- copies of 16 bytes from global to shared memory; groups complete in order --- */

/* 16 zeros unless `there`. Through the L2 alone. */
static __device__ __forceinline__ void fetch_16(uint32_t to, const void *from, bool there)
{
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
static __device__ __forceinline__ void fetch_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/* All groups of this thread but the last LEFT are there. */
template <int LEFT>
static __device__ __forceinline__ void fetched()
{
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

/* --- bulk copies --- */

/* `bytes`, a multiple of 16, from global memory to shared memory; both 16-byte aligned; completes on `barrier`. */
static __device__ __forceinline__ void copy_bytes(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier)
{
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
               "r"(barrier)
               : "memory");
}

/* --- bulk tensor copies --- */

/* Box at (column, row, chunk) of a three-dimensional map to shared memory; completes on `barrier`. */
static __device__ __forceinline__ void copy_box(const CUtensorMap *map, uint32_t to, uint32_t barrier, int column,
                                                int row, int chunk)
{
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(to), "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(chunk)
      : "memory");
}

/* The same to the same place in every block of `mask` of the cluster; completes on the same barrier of each. */
static __device__ __forceinline__ void copy_box_to(const CUtensorMap *map, uint32_t to, uint32_t barrier, int column,
                                                   int row, int chunk, uint16_t mask)
{
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(chunk), "h"(mask)
      : "memory");
}

static __device__ __forceinline__ void fetch_map(const CUtensorMap *map)
{
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* Box at (column, row, plane) of a three-dimensional map from shared memory; what lies outside the map is left out. */
static __device__ __forceinline__ void copy_box_out(const CUtensorMap *map, uint32_t from, int column, int row, int plane)
{
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(from),
               "r"(column), "r"(row), "r"(plane)
               : "memory");
}

static __device__ __forceinline__ void copy_out_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

/* This thread's copies have read their shared memory; the end of the kernel is what makes them visible. */
static __device__ __forceinline__ void copy_out_finish() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

/* --- warpgroup products: d[64, N] (+)= A[64, 16] B[16, N]; rows in memory of 128-byte swizzled atoms --- */

/* Operand descriptor: atoms of 8 rows × 128 bytes, 128-byte swizzle, next atom 1,024 bytes on. Both offsets say so: one
 * is read for an operand whose rows run along the summed axis, the other for a transposed one of width 64. */
static __device__ __forceinline__ uint64_t wgmma_operand(uint32_t address)
{
  return (uint64_t)((address & 0x3ffffu) >> 4) | (uint64_t)(1024 >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 |
         (uint64_t)1 << 62;
}

static __device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
static __device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
static __device__ __forceinline__ void wgmma_wait()
{
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

/* Registers a thread of this warpgroup may use from here. */
template <int COUNT>
static __device__ __forceinline__ void registers_more()
{
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
static __device__ __forceinline__ void registers_fewer()
{
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

/* A in registers: of each warp's 16 rows, what four 8 x 8 matrices of ldmatrix hold. N = 64. */
template <bool F16>
static __device__ __forceinline__ void wgmma_registers(float *d, const uint32_t *a, uint64_t b, int add)
{
  if constexpr (F16)
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

/* Both in shared memory. N = 64. */
template <bool F16>
static __device__ __forceinline__ void wgmma_shared(float *d, uint64_t a, uint64_t b, int add)
{
  if constexpr (F16)
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1, 0, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(add));
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "%32, %33, p, 1, 1, 0, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "l"(a), "l"(b), "r"(add));
}

template <bool F16>
static __device__ __forceinline__ void wgmma_n16(float *d, uint64_t a, uint64_t b, int add)
{
  if constexpr (F16)
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, "
        "%8, %9, p, 1, 1, 1, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "l"(a), "l"(b), "r"(add));
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7}, "
        "%8, %9, p, 1, 1, 1, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "l"(a), "l"(b), "r"(add));
}

template <bool F16>
static __device__ __forceinline__ void wgmma_n24(float *d, uint64_t a, uint64_t b, int add)
{
  if constexpr (F16)
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %14, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n24k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, "
        "%12, %13, p, 1, 1, 1, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
        : "l"(a), "l"(b), "r"(add));
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %14, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n24k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, "
        "%12, %13, p, 1, 1, 1, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
        : "l"(a), "l"(b), "r"(add));
}

template <bool F16>
static __device__ __forceinline__ void wgmma_n48(float *d, uint64_t a, uint64_t b, int add)
{
  if constexpr (F16)
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %26, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23}, "
        "%24, %25, p, 1, 1, 1, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
        : "l"(a), "l"(b), "r"(add));
  else
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %26, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
        "%22, %23}, "
        "%24, %25, p, 1, 1, 1, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
        : "l"(a), "l"(b), "r"(add));
}

/* Both in shared memory, A transposed: its rows in memory run along the summed axis. */
template <int N, bool F16>
static __device__ __forceinline__ void wgmma_transposed(float *d, uint64_t a, uint64_t b, int add)
{
  if constexpr (N == 16) wgmma_n16<F16>(d, a, b, add);
  if constexpr (N == 24) wgmma_n24<F16>(d, a, b, add);
  if constexpr (N == 48) wgmma_n48<F16>(d, a, b, add);
}

/* --- 8 × 8 matrices of 16-bit numbers; lane i gives the address of row i % 8 of matrix i / 8 --- */

static __device__ __forceinline__ void load_matrices(uint32_t *to, uint32_t row)
{
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

/* Two, transposed: row i % 8 of matrix i / 8 becomes its column. */
static __device__ __forceinline__ void store_transposed(uint32_t row, uint32_t a, uint32_t b)
{
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(a), "r"(b) : "memory");
}

static __device__ __forceinline__ void store_matrices(uint32_t row, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

#endif
