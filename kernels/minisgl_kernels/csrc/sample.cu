// The next token of each row of logits: the largest logit, or the largest logit plus Gumbel noise.
//
// What is drawn is defined in minisgl/engine/philox.py, to the bit; compile with -fmad=false. A
// cluster of blocks takes one row and reads it once. A bound in float32 of the scores of each eight
// tokens, which needs no other token, rules out all but a few: only these get the two binary64
// logarithms, when the cluster has agreed on the largest logit and on what the best score is at
// least. No sort, no scratch memory, one launch. With filters a second look finds the bounds.
#include <cooperative_groups.h>

#include <type_traits>

#include "common.cuh"
#include "noise.h"

using namespace minisgl;
namespace cg = cooperative_groups;

namespace {

using T = ELEMENT;

// Macros: ELEMENT, the type of the logits; THREADS of a block.
constexpr int kCluster = 8;
constexpr int kAhead = 2;  // loads of a thread before it looks at the first
constexpr int kWarps = THREADS / 32;
constexpr int kTokens = 8;  // a thread takes at a time: two Philox blocks
constexpr int kStep = THREADS * kTokens;
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

// One row's constants in the search.
struct Draw {
  Philox noise;
  float temperature;
  float slope;  // a little under 1 / temperature: (x - largest) slope is never less than y
  float scale;  // 1 / temperature, rounded
  float largest;
  bool limits;  // whether filters are on, with:
  float least;
  int64_t last;

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
    // No words are needed where even the largest noise would lose, or where none passes.
    if (!(fmaf(nearest, d.slope, kMaxNoise) >= kMinScore)) return;
    if (d.limits && !(nearest * d.slope >= d.least)) return;
    words[0] = d.noise.words(first / 4);
    words[1] = d.noise.words(first / 4 + 1);
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

  __device__ void take(float top, int i) {
    const bool better = top > best;
    second = fmaxf(second, fminf(best, top));
    best = fmaxf(best, top);
    group = better ? i : group;
  }
};

// Eight logits as they are loaded.
struct Raw {
  typename Access::Piece piece[Access::kBytes / Access::kPiece];

  __device__ Access open() const { return reinterpret_cast<const Access&>(*this); }
};

// A block's share of a row.
struct Share {
  const T* from;
  int begin, count;
  bool whole;  // aligned, and all groups are full

  template <bool WHOLE>
  __device__ Raw raw(uint32_t i) const {
    if constexpr (WHOLE) {
      return *reinterpret_cast<const Raw*>(from + i);
    } else {
      alignas(16) Access x;
#pragma unroll
      for (uint32_t j = 0; j < kTokens; ++j) {
        x.of[j] = i + j < static_cast<uint32_t>(count) ? from[i + j] : from_float<T>(-kInfinity);
      }
      return reinterpret_cast<const Raw&>(x);
    }
  }
  __device__ Access group(int i) const { return (whole ? raw<true>(i) : raw<false>(i)).open(); }
};

#ifdef __CUDA_ARCH__
// The larger of two pairs, by their places; NaN where one is.
template <class E>
__device__ uint32_t larger_pair(uint32_t a, uint32_t b) {
  uint32_t m;
  if constexpr (std::is_same_v<E, __half>) {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(m) : "r"(a), "r"(b));
  }
  return m;
}
#endif

// The largest of eight logits; NaN if one is.
__device__ float largest_of(const Raw& raw) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 2) {
    const uint4 w = reinterpret_cast<const uint4&>(raw);
    const uint32_t m = larger_pair<T>(larger_pair<T>(w.x, w.y), larger_pair<T>(w.z, w.w));
    const auto pair = reinterpret_cast<const Vec<T, 2>&>(m);
    return max_or_nan(to_float(pair.of[0]), to_float(pair.of[1]));
  }
#endif
  const Access x = raw.open();
  float m = to_float(x.of[0]);
#pragma unroll
  for (int j = 1; j < kTokens; ++j) m = max_or_nan(m, to_float(x.of[j]));
  return m;
}

__device__ uint32_t largest_of(const Words& a, const Words& b) {
  uint32_t most = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    most = a.of[j] > most ? a.of[j] : most;
    most = b.of[j] > most ? b.of[j] : most;
  }
  return most;
}

// The key of the largest logit among this thread's groups and, with DRAW, bounds of scores. These
// are of x / temperature plus noise, because the row's largest logit is not known yet, and of a
// group's largest logit with its largest word: one bound for eight tokens.
template <bool WHOLE, bool DRAW>
__device__ uint64_t read_share(const Share& s, const Draw& d, Seen* seen) {
  float most = -kInfinity;
  const int start = threadIdx.x * kTokens;
  int at = start;
  Raw ahead[kAhead];
#pragma unroll
  for (int a = 0; a < kAhead; ++a) {
    if (start + a * kStep < s.count) ahead[a] = s.raw<WHOLE>(start + a * kStep);
  }
#pragma unroll 1
  for (int base = start; base < s.count; base += kAhead * kStep) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int i = base + a * kStep;
      if (i >= s.count) break;
      const Raw x = ahead[a];
      if (i + kAhead * kStep < s.count) ahead[a] = s.raw<WHOLE>(i + kAhead * kStep);
      const float m = largest_of(x);
      at = m > most ? i : at;
      most = max_or_nan(most, m);
      if constexpr (DRAW) {
        const uint32_t block = static_cast<uint32_t>(s.begin + i) / 4;
        const uint32_t word = largest_of(d.noise.words(block), d.noise.words(block + 1));
        seen->take(fmaf(m, d.scale, noise_bound(word)), i);
      }
    }
  }
  if (start >= s.count) return 0;
  if (most != most) {  // the first group that has a NaN
    at = start;
    for (float m = 0; m == m; at += kStep) m = largest_of(s.raw<WHOLE>(at));
    at -= kStep;
  }
  const Access x = s.raw<WHOLE>(at).open();
  int id = s.begin + at;
#pragma unroll
  for (int j = kTokens - 1; j >= 0; --j) {
    const float f = to_float(x.of[j]);
    if (f == most || f != f) id = s.begin + at + j;
  }
  return uint64_t{ordered(most)} << 32 | ~static_cast<uint32_t>(id);
}

// The bounds of scores where filters rule out tokens.
__device__ Seen look(const Share& s, const Draw& d) {
  Seen seen;
  for (int i = threadIdx.x * kTokens; i < s.count; i += kStep) {
    seen.take(Group(d, s.group(i), s.begin + i).top, i);
  }
  return seen;
}

// A lower bound of the score of a group's most promising token, if the filters let it pass.
__device__ float promise(const Draw& d, const Group& g, int first) {
  if (g.top == -kInfinity) return kMinScore;  // without words
  float distance = 0.0f;
  uint32_t word = 0;
  int id = first;
#pragma unroll
  for (int j = 0; j < kTokens; ++j) {
    if (g.bound[j] == g.top) distance = g.below[j], word = g.words[j / 4].of[j % 4], id = first + j;
  }
  const float y = __fdiv_rn(distance, d.temperature);
  return d.passes(y, id) ? fmaxf(kMinScore, y + noise_floor(word)) : kMinScore;
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

// Another block's shared memory may be written once that block has started. Nothing written before
// need be seen, so this arrives without a fence.
__device__ void say_started() {
#ifdef __CUDA_ARCH__
  asm volatile("barrier.cluster.arrive.relaxed.aligned;");
#else
  cg::this_cluster().barrier_arrive();
#endif
}

// What a block tells the others: the key of its largest logit, and what its best score is at least.
struct Told {
  uint64_t key;
  float floor;
};

// In shared memory.
struct Meeting {
  uint64_t keys[kWarps], bounds[kWarps];
  Told told[2][kCluster];
  Best warps[kWarps], blocks[kCluster];
};

// The most that any block tells, and this block's largest bound in `bound`. The first time floors
// are in the units of the bounds of `read_share`; the second time, after `look`, of scores.
__device__ Told agree(Meeting& meeting, int time, uint64_t key, const Share& s, const Draw& d,
                      const Seen& seen, float* bound) {
  const cg::cluster_group cluster = cg::this_cluster();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  key = warp_best(key);
  uint64_t mine = seen.group < 0 ? 0 : uint64_t{ordered(seen.best)} << 32 | (threadIdx.x + 1);
  mine = warp_best(mine);
  if (lane == 0) meeting.keys[warp] = key, meeting.bounds[warp] = mine;
  __syncthreads();
  key = warp_best(lane < kWarps ? meeting.keys[lane] : 0);
  mine = warp_best(lane < kWarps ? meeting.bounds[lane] : 0);
  if (time == 0) cluster.barrier_wait();
  const uint32_t speaker = static_cast<uint32_t>(mine);  // and one more; 0: no bounds
  *bound = speaker ? unordered(static_cast<uint32_t>(mine >> 32)) : -kInfinity;
  if (threadIdx.x == (speaker ? speaker - 1 : 0)) {
    Told told{key, -kInfinity};
    if (speaker) {
      const Access x = s.group(seen.group);
      Draw own = d;
      if (time == 0) {
        own.largest = -kInfinity;
#pragma unroll
        for (int j = 0; j < kTokens; ++j) own.largest = fmaxf(own.largest, to_float(x.of[j]));
      }
      const int first = s.begin + seen.group;
      told.floor = promise(own, Group(own, x, first), first);
      if (time == 0) told.floor += own.largest * d.scale;
    }
    const int rank = static_cast<int>(cluster.block_rank());
    for (int i = 0; i < kCluster; ++i) {
      *cluster.map_shared_rank(&meeting.told[time][rank], (rank + i) % kCluster) = told;
    }
  }
  cluster.sync();
  Told all = meeting.told[time][0];
#pragma unroll
  for (int i = 1; i < kCluster; ++i) {
    const Told other = meeting.told[time][i];
    if (other.key > all.key) all.key = other.key;
    all.floor = fmaxf(all.floor, other.floor);
  }
  return all;
}

__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(THREADS, 1024 / THREADS)
    sample(const __grid_constant__ Params p) {
  __shared__ Meeting meeting;
  const cg::cluster_group cluster = cg::this_cluster();
  const int rank = static_cast<int>(cluster.block_rank()), row = blockIdx.x / kCluster;
  if (threadIdx.x < kCluster) meeting.blocks[threadIdx.x].token = -1;
  say_started();
  Share s;
  s.begin = rank * p.share, s.count = max(min(p.vocab - s.begin, p.share), 0);
  s.from = p.logits + row * p.stride + s.begin;
  s.whole = p.aligned && s.count % kTokens == 0;
  wait_for_previous();
  launch_next();

  const bool greedy = p.greedy[row], limits = p.least != nullptr;
  const uint64_t seed = static_cast<uint64_t>(p.seeds[row]);
  const int64_t position = entry(p.positions, p.wide_positions, row);
  Draw d{Philox(static_cast<uint32_t>(position), static_cast<uint32_t>(seed),
                static_cast<uint32_t>(seed >> 32))};
  d.temperature = p.temperature[row];
  d.scale = __frcp_rd(d.temperature);
  d.slope = d.scale * (1.0f - 0x1p-21f);
  d.least = -kInfinity, d.last = p.vocab;

  Seen seen;
  uint64_t key;
  if (greedy || limits) {
    key = s.whole ? read_share<true, false>(s, d, &seen)
                  : read_share<false, false>(s, d, &seen);
  } else {
    key = s.whole ? read_share<true, true>(s, d, &seen)
                  : read_share<false, true>(s, d, &seen);
  }
  float bound;
  Told all = agree(meeting, 0, key, s, d, seen, &bound);
  const int most_likely = static_cast<int>(~static_cast<uint32_t>(all.key));
  const uint32_t high = static_cast<uint32_t>(all.key >> 32);
  const bool finite = high > ordered(-kInfinity) && high < ordered(kInfinity);
  if (greedy || !finite) {  // alike in all blocks of the cluster
    if (rank == 0 && threadIdx.x == 0) finish(p, row, most_likely);
    return;
  }

  d.largest = unordered(high);
  float needed = kMinScore, least_bound = -kInfinity;
  if (limits) {
    d.limits = true, d.least = p.least[row], d.last = p.last[row];
    seen = look(s, d);
    all = agree(meeting, 1, key, s, d, seen, &bound);
    needed = least_bound = fmaxf(all.floor, kMinScore);
  } else {
    // From the units of the bounds to those of scores, less what rounding may have taken; where
    // the units overflow, all bounds reach the threshold.
    const float shift = d.largest * d.scale, slack = fmaf(fabsf(shift), 0x1p-19f, 4e-5f);
    if (fabsf(shift) < 1e30f) {
      needed = fmaxf(all.floor - shift - slack, kMinScore);
      least_bound = needed + shift - slack;
    }
  }
  if (bound >= least_bound) {  // alike in all threads of a block
    Best best{0, -1};
    if (seen.best >= least_bound) {
      for (int i = threadIdx.x * kTokens; i < s.count; i += kStep) {
        if (i != seen.group && seen.second < least_bound) continue;
        settle(d, Group(d, s.group(i), s.begin + i), s.begin + i, needed, &best);
      }
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    best = warp_best(best);
    if (lane == 0) meeting.warps[warp] = best;
    __syncthreads();
    if (warp == 0) {
      best = warp_best(lane < kWarps ? meeting.warps[lane] : Best{0, -1});
      if (lane == 0) *cluster.map_shared_rank(meeting.blocks + rank, 0) = best;
    }
  }
  cluster.barrier_arrive();
  if (rank != 0) return;
  cluster.barrier_wait();
  if (threadIdx.x == 0) {
    Best best = meeting.blocks[0];
    for (int i = 1; i < kCluster; ++i) best.take(meeting.blocks[i].score, meeting.blocks[i].token);
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
  return launch(sample, args.size(1, 0) * kCluster, THREADS, 0, args.stream(), p);
}
