/* Sums over ranks by posted values, over memory that NCCL's device API lets all ranks reach. Layer: backend (CUDA), device code.
 *
 * A rank stores four floats into a cell of the receiver's that belongs to sender, block and thread, and to odd or to even rounds; the
 * receiver looks at the cell until each of its words is there, sums in rank order (the same bits on every rank) and makes the cell
 * empty again: a word of ones, a NaN that is never sent. So 16 bytes carry 16, there is no barrier, and nothing can be taken for
 * what an earlier round left (known fault F28). A cell is written again two rounds later, by a sender that has then received the
 * round between, which its peer sent when its kernel before, which empties the cells of this one, had ended (known fault F29): every
 * round receives something from every peer in some block, and a kernel sends behind its wait alone. The number of a block's round is
 * counted on in device memory and says which set of cells is meant, no more. Stores and loads are relaxed: what orders them is that a kernel's end
 * completes its stores, and that they meet in the receiver's L2. Wants <nccl_device.h> before it. */
#ifndef K3_KERNELS_POSTS_CUH
#define K3_KERNELS_POSTS_CUH

#include "kernels/posted.cuh"

namespace k3 {

enum { POST_LINE = 128 /* bytes before a block's cells: its round */, POST_CELLS = 256 /* of a block for each rank */ };

/* What a kernel that sums is given. */
struct PostSession {
  ncclDevComm comm;
  ncclDevResourceHandle_t memory;
  int64_t spin_ns; /* test hook: how long a rank lingers before it empties its cells */
};

static __host__ __device__ inline size_t post_bytes(int world)
{
  return POST_LINE + 2 * 4 * sizeof(float) * POST_CELLS * world;
}

static __device__ __forceinline__ void post(float4 *at, float4 x)
{
  asm volatile("st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}

static __device__ __forceinline__ float4 look(const float4 *at)
{
  float4 x;
  asm volatile("ld.relaxed.sys.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "l"(at)
               : "memory");
  return x;
}

static __device__ __forceinline__ void linger(int64_t spin_ns)
{
  if (spin_ns == 0) return;
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin)::"memory");
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  while ((int64_t)(now - begin) < spin_ns);
}

/* One block's round. WORLD: the number of ranks, or 0 for any. cell: below POST_CELLS, another in each call of a thread or block. */
template <int WORLD> class Posts {
  static constexpr int AT_ONCE = WORLD ? WORLD : 8;
  const PostSession &session;
  const int block, rank, world;
  char *own; /* this rank's memory of the block */
  uint32_t round;
  size_t set;

  __device__ __forceinline__ float4 *place(char *memory, int sender, int cell) const
  {
    return (float4 *)(memory + set) + sender * POST_CELLS + cell;
  }

public:
  /* When the kernel that had the block's last round has ended. */
  __device__ __forceinline__ Posts(const PostSession &its, int its_block)
      : session(its), block(its_block), rank(its.comm.lsaRank), world(WORLD ? WORLD : its.comm.lsaSize)
  {
    own = (char *)ncclGetResourceBufferLocalPointer(its.comm, its.memory) + block * post_bytes(world);
    round = __ldcg((const uint32_t *)own);
    set = POST_LINE + (round & 1) * sizeof(float4) * POST_CELLS * world;
  }

  /* To all others; what sum must be given is returned. */
  __device__ __forceinline__ float4 send(int cell, float4 x) const
  {
    x.x = to_post(x.x), x.y = to_post(x.y), x.z = to_post(x.z), x.w = to_post(x.w);
    const ncclTeam team = ncclTeamLsa(session.comm);
#pragma unroll(AT_ONCE)
    for (int i = 1; i < world; i++) {
      const int peer = rank + i < world ? rank + i : rank + i - world;
      char *memory = (char *)ncclGetResourceBufferPeerPointer(session.comm, session.memory, team, peer);
      post(place(memory + block * post_bytes(world), rank, cell), x);
    }
    return x;
  }

  __device__ __forceinline__ float4 sum(int cell, float4 mine) const
  {
    float4 total = mine;
    for (int first = 0; first < world; first += AT_ONCE) {
      float4 x[AT_ONCE];
      bool all;
      do {
        all = true;
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++)
          x[r] = first + r < world && first + r != rank ? look(place(own, first + r, cell)) : mine;
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++)
          all &= is_posted(x[r].x) && is_posted(x[r].y) && is_posted(x[r].z) && is_posted(x[r].w);
      } while (!all);
      if (first == 0) total = x[0];
#pragma unroll
      for (int r = 0; r < AT_ONCE; r++)
        if (first + r > 0 && first + r < world)
          total.x += x[r].x, total.y += x[r].y, total.z += x[r].z, total.w += x[r].w;
    }
    return total;
  }

  /* What sum has read. */
  __device__ __forceinline__ void empty(int cell) const
  {
    const float none = __uint_as_float(NOT_POSTED);
#pragma unroll(AT_ONCE)
    for (int r = 0; r < world; r++)
      if (r != rank) post(place(own, r, cell), make_float4(none, none, none, none));
  }

  /* By one thread, when all of the block have met since they were here first. */
  __device__ __forceinline__ void end() const { *(uint32_t *)own = round + 1; }
};

} /* namespace k3 */
#endif
