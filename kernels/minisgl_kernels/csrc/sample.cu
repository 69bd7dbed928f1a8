// The next token of each row of logits: the largest logit, or the largest logit plus Gumbel noise.
//
// What is drawn is defined in minisgl/engine/philox.py, to the bit; compile with -fmad=false. A
// cluster of blocks takes one row and reads it once: each block keeps its share in shared memory,
// the cluster agrees on the largest logit, then each block looks for its best token. A bound in
// float32 of each token's score rules out all but a few; only these get the two binary64
// logarithms. No sort, no scratch memory, one launch.
#include <cooperative_groups.h>

#include "common.cuh"
#include "noise.h"

using namespace minisgl;
namespace cg = cooperative_groups;

namespace {

using T = ELEMENT;

// Macros: ELEMENT, the type of the logits; threads of a block, FEW for a large batch, MANY for a
// small one, which does not fill the device otherwise.
constexpr int kCluster = 8;
constexpr int kSmall = 132;  // blocks of a small batch: about one for each multiprocessor
constexpr int kTokens = 8;  // a thread takes at a time: two Philox blocks
constexpr float kInfinity = __builtin_huge_valf();
constexpr float kMinScore = -3.1302f;  // the largest logit's token passes all filters, with y = 0
using Access = Vec<T, kTokens>;

struct Params {
  const T* logits;
  int64_t stride;
  int vocab, share;  // share: tokens of a block, a multiple of kTokens
  bool aligned, wide_positions, wide_index;
  const float* temperature;
  const int64_t* seeds;
  const void* positions;
  const uint8_t* greedy;
  const float* least;    // may be null, and last with it: no filters
  const int64_t* last;
  int* tokens;
  int* token_pool;       // may be null, and output_index with it
  const void* output_index;
};

__device__ float max_or_nan(float a, float b) {
#ifdef __CUDA_ARCH__
  float m;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
  return m;
#else
  return a != a ? a : a > b ? a : b;
#endif
}

// The larger value, and of equal values the lower id, which stands inverted in the low half.
__device__ uint64_t warp_best(uint64_t key) {
  const uint32_t high = static_cast<uint32_t>(key >> 32);
  const uint32_t most = __reduce_max_sync(kAll, high);
  const uint32_t low = __reduce_max_sync(kAll, high == most ? static_cast<uint32_t>(key) : 0u);
  return uint64_t{most} << 32 | low;
}

struct Best {
  double score;
  int token;  // -1: none yet

  __device__ void take(double other, int id) {
    if (id >= 0 && (token < 0 || other > score || (other == score && id < token))) {
      score = other, token = id;
    }
  }
};

__device__ Best warp_best(Best best) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const double score = __shfl_xor_sync(kAll, best.score, step);
    best.take(score, __shfl_xor_sync(kAll, best.token, step));
  }
  return best;
}

__device__ int64_t entry(const void* column, bool wide, int i) {
  return wide ? static_cast<const int64_t*>(column)[i] : static_cast<const int32_t*>(column)[i];
}

__device__ void finish(const Params& p, int row, int token) {
  p.tokens[row] = token;
  if (p.token_pool) p.token_pool[entry(p.output_index, p.wide_index, row)] = token;
}

// This block's share of the row to shared memory; the key of its largest logit, for this thread.
template <int kThreads>
__device__ uint64_t read_share(const Params& p, const T* from, int begin, int count, Access* share) {
  float most = -kInfinity;
  int at = -1;
#pragma unroll 4
  for (int i = threadIdx.x * kTokens; i < count; i += kThreads * kTokens) {
    Access x;
    if (p.aligned && i + kTokens <= count) {
      x = Access::load(from + i);
    } else {
#pragma unroll
      for (int j = 0; j < kTokens; ++j) {
        x.of[j] = i + j < count ? from[i + j] : from_float<T>(-kInfinity);
      }
    }
    share[i / kTokens] = x;
    float m = to_float(x.of[0]);
#pragma unroll
    for (int j = 1; j < kTokens; ++j) m = max_or_nan(m, to_float(x.of[j]));
    if (at < 0 || (!(m <= most) && most == most)) most = m, at = i;
  }
  if (at < 0) return 0;
  const Access x = share[at / kTokens];
  int id = begin + at;
#pragma unroll
  for (int j = kTokens - 1; j >= 0; --j) {
    const float f = to_float(x.of[j]);
    if (f == most || f != f) id = begin + at + j;
  }
  return uint64_t{ordered(most)} << 32 | ~static_cast<uint32_t>(id);
}

// One row's constants in the search.
struct Draw {
  float largest, temperature;
  float slope;  // a little under 1 / temperature: (x - largest) slope is never less than y
  float least;
  int64_t last;
  bool limits;
  uint32_t position, k0, k1;

  __device__ bool passes(float y, int id) const { return y > least || (y == least && id <= last); }
};

// Eight neighbouring tokens: their words and upper bounds of their scores.
struct Group {
  float below[kTokens], bound[kTokens], top;
  Words words[2];

  __device__ Group(const Draw& d, const Access& x, int first) : top(-kInfinity) {
    float nearest = -kInfinity;
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      below[j] = __fsub_rn(to_float(x.of[j]), d.largest);
      nearest = fmaxf(nearest, below[j]);
    }
    // No words are needed where even the largest noise would lose.
    if (!(fmaf(nearest, d.slope, kMaxNoise) >= kMinScore)) return;
    words[0] = philox(first / 4, d.position, d.k0, d.k1);
    words[1] = philox(first / 4 + 1, d.position, d.k0, d.k1);
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      bound[j] = fmaf(below[j], d.slope, noise_bound(words[j / 4].of[j % 4]));
    }
    if (d.limits) {
#pragma unroll
      for (int j = 0; j < kTokens; ++j) {
        if (!(below[j] * d.slope >= d.least)) bound[j] = -kInfinity;
      }
    }
#pragma unroll
    for (int j = 0; j < kTokens; ++j) top = fmaxf(top, bound[j]);
  }
};

// What a thread has seen: its largest bound and where it is, and the largest of other groups.
struct Seen {
  float best = -kInfinity, second = -kInfinity;
  int group = -1;
};

template <int kThreads>
__device__ Seen look(const Draw& d, const Access* share, int begin, int count) {
  Seen seen;
  for (int i = threadIdx.x * kTokens; i < count; i += kThreads * kTokens) {
    const Group g(d, share[i / kTokens], begin + i);
    if (g.top > seen.best) {
      seen.second = seen.best, seen.best = g.top, seen.group = i;
    } else {
      seen.second = fmaxf(seen.second, g.top);
    }
  }
  return seen;
}

// A lower bound of the score of a group's most promising token, if the filters let it pass.
__device__ float promise(const Draw& d, const Group& g, int first) {
  float floor = kMinScore;
#pragma unroll
  for (int j = 0; j < kTokens; ++j) {
    if (g.bound[j] != g.top) continue;
    const float y = __fdiv_rn(g.below[j], d.temperature);
    if (d.passes(y, first + j)) floor = fmaxf(floor, y + noise_floor(g.words[j / 4].of[j % 4]));
  }
  return floor;
}

// The exact scores of a group's tokens whose bounds reach the threshold.
__device__ void settle(const Draw& d, const Group& g, int first, float needed, Best* best) {
  uint32_t mask = 0;
#pragma unroll
  for (int j = 0; j < kTokens; ++j) mask |= (g.bound[j] >= needed) << j;
  if (!(g.top >= needed)) mask = 0;  // without words
  while (mask) {
    const int pick = __ffs(mask) - 1;
    mask &= mask - 1;
    float distance = 0.0f;
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      if (j == pick) distance = g.below[j], word = g.words[j / 4].of[j % 4];
    }
    const float y = __fdiv_rn(distance, d.temperature);
    if (d.passes(y, first + pick)) {
      best->take(static_cast<double>(y) + gumbel(word), first + pick);
    }
  }
}

template <int THREADS>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(THREADS, 1024 / THREADS)
    sample(const __grid_constant__ Params p) {
  constexpr int kThreads = THREADS, kWarps = kThreads / 32;
  DYNAMIC_SHARED(uint4, dynamic);
  __shared__ uint64_t warp_keys[kWarps], block_keys[kCluster];
  __shared__ Best warp_bests[kWarps], block_bests[kCluster];
  __shared__ uint32_t threshold;
  auto* share = reinterpret_cast<Access*>(dynamic);
  const cg::cluster_group cluster = cg::this_cluster();
  const int rank = static_cast<int>(cluster.block_rank()), row = blockIdx.x / kCluster;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int begin = rank * p.share, count = max(min(p.vocab - begin, p.share), 0);
  // Another block's shared memory may be written once that block has started.
  cluster.barrier_arrive();
  if (threadIdx.x == 0) threshold = ordered(kMinScore);
  wait_for_previous();
  launch_next();

  uint64_t key = read_share<kThreads>(p, p.logits + row * p.stride + begin, begin, count, share);
  key = warp_best(key);
  if (lane == 0) warp_keys[warp] = key;
  __syncthreads();
  cluster.barrier_wait();
  if (warp == 0) {
    key = warp_best(lane < kWarps ? warp_keys[lane] : 0);
    if (lane < kCluster) *cluster.map_shared_rank(block_keys + rank, lane) = key;
  }
  cluster.sync();
#pragma unroll
  for (int i = 0; i < kCluster; ++i) key = i == 0 || block_keys[i] > key ? block_keys[i] : key;
  const int most_likely = static_cast<int>(~static_cast<uint32_t>(key));
  const uint32_t high = static_cast<uint32_t>(key >> 32);
  const bool finite = high > ordered(-kInfinity) && high < ordered(kInfinity);
  if (p.greedy[row] || !finite) {  // alike in all blocks of the cluster
    if (rank == 0 && threadIdx.x == 0) finish(p, row, most_likely);
    return;
  }

  const uint64_t seed = static_cast<uint64_t>(p.seeds[row]);
  Draw d;
  d.largest = unordered(high);
  d.temperature = p.temperature[row];
  d.slope = __frcp_rd(d.temperature) * (1.0f - 0x1p-21f);
  d.limits = p.least != nullptr;
  d.least = d.limits ? p.least[row] : -kInfinity;
  d.last = d.limits ? p.last[row] : p.vocab;
  d.position = static_cast<uint32_t>(entry(p.positions, p.wide_positions, row));
  d.k0 = static_cast<uint32_t>(seed), d.k1 = static_cast<uint32_t>(seed >> 32);

  const Seen seen = look<kThreads>(d, share, begin, count);
  key = seen.group < 0 ? 0 : uint64_t{ordered(seen.best)} << 32 | (threadIdx.x + 1);
  key = warp_best(key);
  if (lane == 0) warp_keys[warp] = key;
  __syncthreads();
  key = warp_best(lane < kWarps ? warp_keys[lane] : 0);
  if (static_cast<uint32_t>(key) == threadIdx.x + 1) {
    const int first = begin + seen.group;
    const uint32_t floor = ordered(promise(d, Group(d, share[seen.group / kTokens], first), first));
    // The other blocks profit from it as soon as they know; this one after the barrier.
    for (int i = 0; i < kCluster; ++i) atomicMax(cluster.map_shared_rank(&threshold, i), floor);
  }
  __syncthreads();
  const float needed = unordered(*static_cast<volatile uint32_t*>(&threshold));
  Best best{0, -1};
  if (seen.best >= needed) {
    for (int i = threadIdx.x * kTokens; i < count; i += kThreads * kTokens) {
      if (i != seen.group && seen.second < needed) continue;
      settle(d, Group(d, share[i / kTokens], begin + i), begin + i, needed, &best);
    }
  }
  best = warp_best(best);
  if (lane == 0) warp_bests[warp] = best;
  __syncthreads();
  if (warp == 0) {
    best = warp_best(lane < kWarps ? warp_bests[lane] : Best{0, -1});
    if (lane == 0) *cluster.map_shared_rank(block_bests + rank, 0) = best;
  }
  cluster.sync();
  if (rank == 0 && threadIdx.x == 0) {
    best = block_bests[0];
    for (int i = 1; i < kCluster; ++i) best.take(block_bests[i].score, block_bests[i].token);
    finish(p, row, best.token >= 0 ? best.token : most_likely);
  }
}

}  // namespace

// (tokens [B] int32, logits [B, V], temperature [B] float32, seeds [B] int64, positions [B],
//  greedy [B] uint8 or bool, least [B] float32 or None, last [B] int64 or None,
//  token_pool int32 or None, output_index [B] or None)
EXPORT(sample) {
  Params p = {};
  p.tokens = args.data<int>(0);
  p.logits = args.data<const T>(1);
  p.stride = args.stride(1, 0);
  p.vocab = static_cast<int>(args.size(1, 1));
  const int each = (p.vocab + kCluster - 1) / kCluster;
  p.share = (each + kTokens - 1) / kTokens * kTokens;
  p.aligned = (address(p.logits) | p.stride * sizeof(T)) % alignof(Access) == 0;
  p.temperature = args.data<const float>(2);
  p.seeds = args.data<const int64_t>(3);
  p.positions = args.data<const void>(4);
  p.wide_positions = args.wide(4);
  p.greedy = args.data<const uint8_t>(5);
  p.least = args.data<const float>(6);
  p.last = args.data<const int64_t>(7);
  p.token_pool = args.data<int>(8);
  p.output_index = args.data<const void>(9);
  p.wide_index = p.output_index && args.wide(9);
  const int shared = p.share * static_cast<int>(sizeof(T));
  static int granted = 0;  // to both, of the one device that this process uses
  if (shared > granted) {
    const auto grant = [&](auto kernel) {
      return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
    };
    if (check(grant(sample<FEW>)) || check(grant(sample<MANY>))) return -1;
    granted = shared;
  }
  const int64_t blocks = args.size(1, 0) * kCluster;
  const auto kernel = blocks > kSmall ? sample<FEW> : sample<MANY>;
  return launch(kernel, blocks, blocks > kSmall ? FEW : MANY, shared, args.stream(), p);
}
