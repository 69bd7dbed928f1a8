// Attention of decode steps: one new token a request over its paged keys and values.
//
// Reading keys and values is the work, so it is what is shared out: the tiles of 16 tokens of all
// requests stand on one axis, cut into chunks; a warp computes a chunk for one KV head. Warps of one
// chunk are neighbours, so that the heads of a token, which lie together in memory, are read at about
// the same time. A request that a cut divides has partial results; the warp that ends last
// combines them. Warps need no one else: each keeps STAGES tiles in shared memory of its own, filled
// by asynchronous copies. (Ends of chunks for whoever is done first made it slower: each part costs
// more than it evens out.)
//
// Most requests that are cut have two parts: the end of one chunk, and the start of the next one,
// which was done long before. So the warp with the former reads the latter while its last tile comes,
// and adds it to what it has in registers.
//
// The products are transposed, S' = K Q' and O' = V' P': then the GROUP query heads of a KV head
// fill the 8 columns of a tensor-core product, and half of the arithmetic and of the registers of
// the usual form (16 rows of queries) are spared. As accumulators, S' and O' hold the same columns
// in the same lanes, so that rescaling needs no exchange.
//
// BOXES: a block has a multiprocessor to itself, and takes the place, and so the chunks, of the one
// that it runs on: some reach the memory faster, and have larger shares. Bits depend on the shares
// alone, not on who computes what.
//
// FUSED: q is the QKV product as it is. Each warp rotates the queries that it needs, and the one that
// has a request's last tile the new key, which it stores, and the value; FUSED 2: normalised first.
#if BOXES
#include "hopper.cuh"
#else
#include "tensor_core.cuh"
#endif
#include "decode_ring.cuh"

using namespace minisgl;

namespace {

using Elem = T;

constexpr int kSteps = HEAD_DIM / 16;     // products along the head
constexpr int kLaneDims = HEAD_DIM / 32;  // dims a lane has when partial results are combined

static_assert(GROUP >= 1 && GROUP <= 8, "query heads of a KV head");
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128, "head dim");
static_assert(!(BOXES && FUSED), "a new token is written where copies by lanes have rows");

__device__ uint32_t pack(float low, float high) {
  Vec<Elem, 2> two;
  two.of[0] = from_float<Elem>(low);
  two.of[1] = from_float<Elem>(high);
  return *reinterpret_cast<const uint32_t*>(two.of);
}

__device__ void unpack(uint32_t both, float* to) {
  const auto& two = *reinterpret_cast<const Vec<Elem, 2>*>(&both);
  to[0] = to_float(two.of[0]);
  to[1] = to_float(two.of[1]);
}

// What keeps those of a pair of neighbouring rows that are among the next `valid` ones.
__device__ uint32_t rows_kept(int valid) {
  return valid >= 2 ? 0xffffffffu : valid == 1 ? 0xffffu : 0u;
}

// Over the lanes that hold the same column of an accumulator.
__device__ float column_max(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(kAll, x, step));
  return x;
}
__device__ float column_sum(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(kAll, x, step);
  return x;
}

struct Inputs {
  Source from;
  const Elem* q;          // [batch, kv_heads * GROUP, HEAD_DIM]; FUSED: with 2 kv_heads behind
  Elem* out;              // [batch, kv_heads * GROUP, HEAD_DIM]
  const Chunk* chunks;
  float* partial;         // [chunks, 2, kv_heads, GROUP, HEAD_DIM], not divided by the sum
  float2* stats;          // [chunks, 2, kv_heads, GROUP]: largest exponent, and sum
  int* arrived;           // [batch, kv_heads], zeros between launches
  // BOXES alone:
  int* claims;            // [blocks] of places; zeros
  int* next_claims;       // of the next launch, zeros behind this one
  int64_t* times;         // [warps, 2] start and end in nanoseconds; may be null
  int64_t q_step;         // elements from one request's q to that of the next
  int kv_heads;
  int max_chunks;
  float scale;            // of the scores, times log2(e)
  // FUSED alone:
  const Elem* q_weight;   // [HEAD_DIM]
  const Elem* k_weight;
  const float* cos_sin;   // [positions, HEAD_DIM]: cosines, then sines
  float eps;
};

constexpr int kHalf = HEAD_DIM / 2;

// Pairs of a head: x[0] are elements of its first half, x[1] those that stand kHalf behind them.
template <int N>
using Pairs = float[2][N];

// What x is to be multiplied by, where LANES neighbouring lanes have a head.
template <int LANES, int N>
__device__ float norm_factor(const Pairs<N>& x, float eps) {
  float squares = 0.f;
#pragma unroll
  for (int i = 0; i < N; ++i) squares += x[0][i] * x[0][i] + x[1][i] * x[1][i];
  return rsqrtf(group_sum<LANES>(squares) / HEAD_DIM + eps);
}

// What normalises and turns N elements of each half that stand together, from `at` on.
template <int N>
struct Angles {
  Vec<float, N> cos, sin;
  Vec<Elem, N> scale[2];

  __device__ void load(const Elem* weight, const float* row, int at) {
    cos = Vec<float, N>::load(row + at);
    sin = Vec<float, N>::load(row + kHalf + at);
    if (FUSED != 2) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) scale[half] = Vec<Elem, N>::load(weight + half * kHalf + at);
  }
  __device__ void turn(float* first, float* second, float factor) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float a = first[i], b = second[i];
      if (FUSED == 2) {
        a *= factor * to_float(scale[0].of[i]);
        b *= factor * to_float(scale[1].of[i]);
      }
      first[i] = a * cos.of[i] - b * sin.of[i];
      second[i] = b * cos.of[i] + a * sin.of[i];
    }
  }
};

// The key and the value of a request's new token, of which each lane has kHalf / 32 neighbouring
// elements of either half.
struct NewToken {
  static constexpr int kEach = kHalf / 32;
  using Part = Vec<Elem, kEach>;
  Part key[2], value[2];
  Angles<kEach> angles;

  __device__ void load(const Elem* k, const Elem* v, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      key[half] = Part::load(k + half * kHalf + lane * kEach);
      value[half] = Part::load(v + half * kHalf + lane * kEach);
    }
  }
  __device__ void turn(float eps) {
    Pairs<kEach> x;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      x[0][i] = to_float(key[0].of[i]);
      x[1][i] = to_float(key[1].of[i]);
    }
    angles.turn(x[0], x[1], FUSED == 2 ? norm_factor<32, kEach>(x, eps) : 1.f);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      key[0].of[i] = from_float<Elem>(x[0][i]);
      key[1].of[i] = from_float<Elem>(x[1][i]);
    }
  }
  // Where a row of a tile has this lane's part.
  __device__ static Elem* place(char* tile, int row, int half, int lane) {
    const int byte = (half * kHalf + lane * kEach) * 2;
    return reinterpret_cast<Elem*>(tile + in_tile(row, byte / 128, byte / 16 % 8) + byte % 16);
  }
};

// Where the part of a request in one chunk stands: the second place is of one that starts there.
__device__ int64_t place(const Inputs& in, int chunk, bool starts, int head) {
  return ((int64_t{chunk} * 2 + starts) * in.kv_heads + head) * GROUP;
}

// What the warp wrote before is seen before what it writes behind, and the same of reads.
__device__ void fence() {
#ifdef __CUDA_ARCH__
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
#endif
}

// All that earlier kernels wrote can be read and copied after this.
__device__ void wait_for_others() {
  wait_for_previous();
#if BOXES
  publish_memory();
#endif
}

// Zero or more, and what was written before that many arrived is seen behind this.
__device__ int load_acquire(const int* from) {
  int x;
#ifdef __CUDA_ARCH__
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
#else
  x = *from;
#endif
  return x;
}

// A part of a request as the accumulators of a warp hold it: dims lane / 4 and lane / 4 + 8 of each
// 16, of query heads lane % 4 * 2 and + 1.
struct Part {
  float out[kSteps][4], top[2], sum[2];

  template <class Go>  // with j, the query head, and its dims' place in a head
  __device__ static void each_column(int lane, Go go) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int g = lane % 4 * 2 + j % 2;
      if (g < GROUP) go(j, g, lane / 4 + j / 2 * 8);
    }
  }
  __device__ void store(const Inputs& in, int64_t at, int lane) const {
    each_column(lane, [&](int j, int g, int dim) {
      float* const to = in.partial + (at + g) * HEAD_DIM + dim;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) __stcg(to + 16 * i, out[i][j]);
      if (lane < 4 && j < 2) __stcg(in.stats + at + g, make_float2(top[j], sum[j]));
    });
  }
  // What another part has in the place of `top` and `sum`.
  __device__ static void load_stats(float2 (&to)[2], const float2* stats, int lane) {
    each_column(lane, [&](int j, int g, int) {
      if (j < 2) to[j] = __ldcg(stats + g);
    });
  }
  // Add another part of the request, whose values are [GROUP, HEAD_DIM]: the same bits, whichever of
  // the two is the other one.
  __device__ void add(const float* values, const float2 (&stats)[2], int lane) {
    float weight[2], its[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float best = fmaxf(top[j], stats[j].x);
      weight[j] = exp2_fast(top[j] - best);
      its[j] = exp2_fast(stats[j].x - best);
      sum[j] = __fadd_rn(__fmul_rn(weight[j], sum[j]), __fmul_rn(its[j], stats[j].y));
    }
    each_column(lane, [&](int j, int g, int dim) {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        out[i][j] = __fadd_rn(__fmul_rn(weight[j % 2], out[i][j]),
                              __fmul_rn(its[j % 2], values[g * HEAD_DIM + dim + 16 * i]));
      }
    });
  }
  __device__ void store_result(Elem* heads, int lane) const {
    const float inverse[2] = {1.f / sum[0], 1.f / sum[1]};
    each_column(lane, [&](int j, int g, int dim) {
      Elem* const to = heads + g * HEAD_DIM + dim;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) to[16 * i] = from_float<Elem>(out[i][j] * inverse[j % 2]);
    });
  }
};

template <int N>
__device__ void load_floats(float (&x)[N], const float* from) {
  if constexpr (N == 4) {
    *reinterpret_cast<float4*>(x) = __ldcg(reinterpret_cast<const float4*>(from));
  } else {
    *reinterpret_cast<float2*>(x) = __ldcg(reinterpret_cast<const float2*>(from));
  }
}

// Add up what the chunks of a request left, and write the result. A lane has kLaneDims dims.
__device__ void combine(const Inputs& in, int index, int chunks, int head, int lane) {
  constexpr int kAhead = (GROUP > 3 ? 16 : 24) / GROUP;  // parts whose loads are on their way
  const int low = chunks >> 16, parts = (chunks & 0xffff) - low + 1;
  const auto at = [&](int part) {
    return static_cast<int>(place(in, low + part, part == 0, head));
  };
  float top[GROUP], sum[GROUP], weight[GROUP], acc[GROUP][kLaneDims];
#pragma unroll
  for (int g = 0; g < GROUP; ++g) {
    top[g] = -INFINITY;
    sum[g] = 0.f;
#pragma unroll
    for (int d = 0; d < kLaneDims; ++d) acc[g][d] = 0.f;
  }
  float x[kAhead][GROUP][kLaneDims];
  const auto load_parts = [&](int from, int until) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const bool any = from + i < until;
      const float* part = in.partial + at(any ? from + i : 0) * HEAD_DIM + lane * kLaneDims;
#pragma unroll
      for (int g = 0; g < GROUP; ++g) {
#pragma unroll
        for (int d = 0; d < kLaneDims; ++d) x[i][g][d] = 0.f;
        if (any) load_floats(x[i][g], part + g * HEAD_DIM);
      }
    }
  };
  for (int base = 0; base < parts; base += 32) {
    const int here = min(32, parts - base);
    float2 stats[GROUP];
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      stats[g] = {-INFINITY, 0.f};
      if (lane < here) stats[g] = __ldcg(in.stats + at(base + lane) + g);
    }
    load_parts(base, base + here);  // they do not wait for each other
#pragma unroll
    for (int g = 0; g < GROUP; ++g) {
      const float2 stat = stats[g];
      float best = fmaxf(stat.x, top[g]);
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        best = fmaxf(best, __shfl_xor_sync(kAll, best, step));
      }
      const float rescale = exp2_fast(top[g] - best);
      weight[g] = exp2_fast(stat.x - best);
      sum[g] = sum[g] * rescale + group_sum<32>(weight[g] * stat.y);
#pragma unroll
      for (int d = 0; d < kLaneDims; ++d) acc[g][d] *= rescale;
      top[g] = best;
    }
    for (int part = 0; part < here; part += kAhead) {
      if (part > 0) load_parts(base + part, base + here);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int g = 0; g < GROUP; ++g) {
          const float w = __shfl_sync(kAll, weight[g], part + i);  // of no part, x is 0
#pragma unroll
          for (int d = 0; d < kLaneDims; ++d) acc[g][d] += w * x[i][g][d];
        }
      }
    }
  }
#pragma unroll
  for (int g = 0; g < GROUP; ++g) {
    Vec<Elem, kLaneDims> result;
    const float inverse = 1.f / sum[g];
#pragma unroll
    for (int d = 0; d < kLaneDims; ++d) result.of[d] = from_float<Elem>(acc[g][d] * inverse);
    const int64_t row = (int64_t{index} * in.kv_heads + head) * GROUP + g;
    result.store(in.out + row * HEAD_DIM + lane * kLaneDims);
  }
}

#if BOXES
// Takes this place, or the next one that no other block has. There are as many as blocks.
__device__ int claim(int* claims, int place) {
  while (atomicExch(claims + place, 1) != 0) {
    place = place + 1 == static_cast<int>(gridDim.x) ? 0 : place + 1;
  }
  return place;
}
#endif

__global__ void attention(const __grid_constant__ Inputs in) {
  DYNAMIC_SHARED(uint4, memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Before `wait_for_previous` the kernel before this one may still run. It stores the new tokens
  // of this layer, so the tile of a request's last token waits for it; what else is copied here,
  // the plan, the page table and older tokens, is done with: no kernel is launched before the plan
  // has ended. Those are read from the L2 cache, where that is sure to be seen.
  int64_t worker;
  int number;
  const auto chunk_at = [&](int place) {
    worker = int64_t{place} * WARPS + warp;
    number = static_cast<int>(worker / in.kv_heads);
    return number < in.max_chunks ? load(in.chunks + number) : Chunk{};
  };
#if BOXES
  __shared__ int claimed;
  const int near = multiprocessor() % static_cast<int>(gridDim.x);
  Chunk chunk = chunk_at(near);  // while the claim is on its way
  if (threadIdx.x == 0) claimed = claim(in.claims, near);
  __syncthreads();
  if (claimed != near) chunk = chunk_at(claimed);
  if (in.times != nullptr && lane == 0) in.times[2 * worker] = nanoseconds();
#else
  const Chunk chunk = chunk_at(blockIdx.x);
#endif
  const auto begin_next = [&]() {
#if BOXES
    // Products let the next kernel begin before they wait, so the next layer's attention may run as
    // soon as this launch lets go: not before the claims that it takes are cleared.
    if (warp != 0) return;
    if (lane == 0) {
      atomicExch(in.next_claims + claimed, 0);
      __threadfence();
    }
    __syncwarp();
#endif
    launch_next();
  };
  if (chunk.start == chunk.end) {
#if BOXES
    wait_for_previous();
    begin_next();
#endif
    return;
  }
  const int head = static_cast<int>(worker % in.kv_heads);

  // Warps' rings stand behind each other, and their barriers behind all.
  const uint32_t skipped = -shared_address(memory) % kRingAlign;
  const uint32_t start = shared_address(memory) + skipped, tiles = start + warp * kRingBytes;
  char* const tiles_here = reinterpret_cast<char*>(memory) + skipped + warp * kRingBytes;
  Ring ring(in.from, chunk, head, tiles, start + WARPS * kRingBytes + warp * kBarrierBytes, lane);
  bool waited = false;
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    if (!FUSED && !waited && ring.next_is_last()) {
      wait_for_others();
      waited = true;
    }
    ring.copy_next(stage);
  }
  // Of the request at hand: its queries as columns, and what was computed of it in this chunk.
  int index = chunk.index;
  Request request = chunk.request;
  uint32_t queries[2 * kSteps];
  Part mine;
  float(&out)[kSteps][4] = mine.out, (&top)[2] = mine.top, (&sum)[2] = mine.sum;
  // FUSED: what turns the queries, and the new token, if its tile is in this chunk.
  [[maybe_unused]] Angles<2> angles[kSteps];
  [[maybe_unused]] NewToken added;
  const auto load_angles = [&]() {
    const float* const row = in.cos_sin + int64_t{request.tokens - 1} * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) angles[i].load(in.q_weight, row, 8 * i + lane % 4 * 2);
    added.angles.load(in.k_weight, row, lane * NewToken::kEach);
  };
  if (FUSED) load_angles();  // no kernel writes these, either
  if (!waited) wait_for_others();
  begin_next();

  const auto begin_request = [&]() {
    const int g = lane / 4;
    const Elem* const row = in.q + index * in.q_step;
    [[maybe_unused]] const bool last = request.end() <= chunk.end;
    [[maybe_unused]] int to = 0;
    if (FUSED && last) {
      const Elem* const k = row + (in.kv_heads * GROUP + head) * HEAD_DIM;
      added.load(k, k + in.kv_heads * HEAD_DIM, lane);
      to = __ldcg(in.from.row(request) + request.tokens - 1);
    }
    const auto* from =
        reinterpret_cast<const uint32_t*>(row + (head * GROUP + g) * HEAD_DIM) + lane % 4;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) queries[i] = g < GROUP ? from[4 * i] : 0u;
    if constexpr (FUSED != 0) {
      Pairs<2 * kSteps> x;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        unpack(queries[i], &x[0][2 * i]);
        unpack(queries[i + kSteps], &x[1][2 * i]);
      }
      const float factor = FUSED == 2 ? norm_factor<4, 2 * kSteps>(x, in.eps) : 1.f;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        angles[i].turn(&x[0][2 * i], &x[1][2 * i], factor);
        queries[i] = pack(x[0][2 * i], x[0][2 * i + 1]);
        queries[i + kSteps] = pack(x[1][2 * i], x[1][2 * i + 1]);
      }
      if (last) {
        added.turn(in.eps);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int64_t at = to * in.from.slot_bytes + head * kRowBytes +
                             (half * kHalf + lane * NewToken::kEach) * 2;
          added.key[half].store(reinterpret_cast<Elem*>(in.from.k + at));
          added.value[half].store(reinterpret_cast<Elem*>(in.from.v + at));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[i][j] = 0.f;
    }
    top[0] = top[1] = -INFINITY;
    sum[0] = sum[1] = 0.f;
  };
  begin_request();

  // Where a lane's rows of 8 by 8 matrices stand in a tile: keys as they are, values transposed.
  const int key_row = lane % 16, key_piece = lane / 16;
  const int value_row = lane % 8 + lane / 16 * 8, value_piece = lane / 8 % 2;
  int stage = 0;
  for (int tile = chunk.start; tile < chunk.end; ++tile) {
    const int end = request.end();
    const bool starts = request.first >= chunk.start;
    const int others = (request.chunks & 0xffff) - (request.chunks >> 16);  // parts of others
    int* const arrived = in.arrived + int64_t{index} * in.kv_heads + head;
    // The other one of two parts, if it has been stored.
    const float* other = nullptr;
    float2 of_other[2] = {};
    ring.wait(stage);
    const int free = stage == 0 ? STAGES - 1 : stage - 1;  // where the tile before this one was
    if (tile + 1 == chunk.end && starts && others == 1 &&
        __shfl_sync(kAll, lane == 0 ? load_acquire(arrived) : 0, 0) == 1) {
      __syncwarp();
      const int64_t at = place(in, number + 1, false, head);
      Part::load_stats(of_other, in.stats + at, lane);
#pragma unroll
      for (int i = 0; i < (GROUP * HEAD_DIM / 4 + 31) / 32; ++i) {
        const int piece = i * 32 + lane;
        if (piece >= GROUP * HEAD_DIM / 4) break;
        copy_async(tiles + free * kStageBytes + piece * 16, in.partial + at * HEAD_DIM + piece * 4);
      }
      end_group();
      other = reinterpret_cast<const float*>(tiles_here + free * kStageBytes);
    }
    ring.copy_next(free);
    const uint32_t keys = tiles + stage * kStageBytes, values = keys + kTileBytes;
    const int valid = request.tokens - (tile - request.first) * kTile;  // rows, from this tile on
    if (FUSED && valid <= kTile) {
      // What was copied for the new token is old; so are the rows behind it, whose weight is zero:
      // their keys are no matter, but a value that is no number would be.
      char* const key_rows = tiles_here + stage * kStageBytes;
      char* const value_rows = key_rows + kTileBytes;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        added.key[half].store(NewToken::place(key_rows, valid - 1, half, lane));
        for (int i = valid - 1; i < kTile; ++i) {
          added.value[half].store(NewToken::place(value_rows, i, half, lane));
        }
      }
      __syncwarp();
    }
    stage = stage == STAGES - 1 ? 0 : stage + 1;

    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      uint32_t a[4];
      load_matrices(a, keys + in_tile(key_row, i / 4, i % 4 * 2 + key_piece));
      product<Elem>(i % 2 ? odd : even, a, queries[2 * i], queries[2 * i + 1]);
    }
    float score[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) score[j] = (even[j] + odd[j]) * in.scale;
    if (valid < kTile) {
      if (lane / 4 >= valid) score[0] = score[1] = -INFINITY;
      if (lane / 4 + 8 >= valid) score[2] = score[3] = -INFINITY;
    }
    const float best[2] = {fmaxf(top[0], column_max(fmaxf(score[0], score[2]))),
                           fmaxf(top[1], column_max(fmaxf(score[1], score[3])))};
    if (__any_sync(kAll, best[0] > top[0] || best[1] > top[1])) {
      const float rescale[2] = {exp2_fast(top[0] - best[0]), exp2_fast(top[1] - best[1])};
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[i][j] *= rescale[j % 2];
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        sum[j] *= rescale[j];
        top[j] = best[j];
      }
    }
    float p[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) p[j] = exp2_fast(score[j] - top[j % 2]);
    sum[0] += p[0] + p[2];
    sum[1] += p[1] + p[3];
    const uint32_t b0 = transpose(pack(p[0], p[1])), b1 = transpose(pack(p[2], p[3]));
    // Boxes have whole tiles: rows behind the last token hold anything, and zero times that is not
    // always zero. A lane has rows lane % 4 * 2 and + 1, and those 8 further on.
    const uint32_t first_rows = rows_kept(valid - lane % 4 * 2);
    const uint32_t last_rows = rows_kept(valid - lane % 4 * 2 - 8);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      uint32_t a[4];
      load_transposed(a, values + in_tile(value_row, i / 4, i % 4 * 2 + value_piece));
      if (BOXES) {
        a[0] &= first_rows, a[1] &= first_rows;
        a[2] &= last_rows, a[3] &= last_rows;
      }
      product<Elem>(out[i], a, b0, b1);
    }

    if (tile + 1 != min(end, chunk.end)) continue;
    sum[0] = column_sum(sum[0]);
    sum[1] = column_sum(sum[1]);
    const auto ends_last = [&]() {  // with this part stored; then all others can be read
      mine.store(in, place(in, number, starts, head), lane);
      __syncwarp();
      fence();
      int before = 0;
      if (lane == 0) before = atomicAdd(arrived, 1);
      before = __shfl_sync(kAll, before, 0);
      if (before < others) return false;
      fence();
      __syncwarp();
      return true;
    };
    if (others > 1) {
      if (ends_last()) {
        if (lane == 0) *arrived = 0;
        combine(in, index, request.chunks, head, lane);
      }
    } else {
      if (other != nullptr) {
        wait_groups<0>();
        __syncwarp();
      } else if (others == 1 && ends_last()) {
        const int64_t at = place(in, starts ? number + 1 : number - 1, !starts, head);
        Part::load_stats(of_other, in.stats + at, lane);
        other = in.partial + at * HEAD_DIM;
      }
      if (other != nullptr) {
        if (lane == 0) *arrived = 0;
        mine.add(other, of_other, lane);
      }
      if (other != nullptr || others == 0) {
        mine.store_result(in.out + (int64_t{index} * in.kv_heads + head) * GROUP * HEAD_DIM, lane);
      }
    }
    if (tile + 1 < chunk.end) {
      request = load(in.from.requests + ++index);
      if (FUSED) load_angles();
      begin_request();
    }
  }
  wait_groups<0>();
#if BOXES
  if (in.times != nullptr && lane == 0) in.times[2 * worker + 1] = nanoseconds();
#endif
}

}  // namespace

// (chunks [max_chunks, 8], requests [batch + 1 or more, 4], lens [batch], rows [batch], balance,
//  shares [max_chunks + 1] or None, claims [2, blocks] of decode_attention)
EXPORT(plan_decode_attention) {
  const int batch = static_cast<int>(args.size(2, 0));
  const int chunks = static_cast<int>(args.size(0, 0));
  return launch(plan, batch > 0, kPlanThreads, (batch + 1 + chunks + 1) * sizeof(int), args.stream(),
                args.data<const int>(2), args.data<const int>(3), args.data<const int>(5),
                args.data<Chunk>(0), args.data<Request>(1), args.data<int>(6),
                args.size(6, 0) * args.size(6, 1), batch, chunks, args.integer(4));
}

// (q, out [batch, heads, dim], k_slots, v_slots [slots, kv_heads, dim], page_table [rows, columns],
//  chunks, requests, partial, stats, arrived, scale); BOXES: and then claims [2, blocks], which of
//  both this launch has, the other one having been that of the launch before or nobody's since
//  the plan, and times [warps, 2] int64 or None; FUSED: (qkv [batch, (heads + 2 kv_heads) dim], and
//  then q_weight [dim] or None, k_weight, eps, cos_sin [positions, dim])
EXPORT(decode_attention) {
  constexpr int kShared = WARPS * (kRingBytes + kBarrierBytes) + (BOXES ? kRingAlign : 0);
  static int ready = -1;  // the device on which the kernel may take that much shared memory
  const int device = args.tensor(0)->device.device_id;
  if (ready != device) {
    const cudaError_t error =
        cudaFuncSetAttribute(attention, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    if (error != cudaSuccess) return check(error);
    ready = device;
  }
  Inputs in;
  in.q = args.data<const Elem>(0);
  in.out = args.data<Elem>(1);
  in.from.k = args.data<char>(2);
  in.from.v = args.data<char>(3);
  in.from.page_table = args.data<const int>(4);
  in.from.requests = args.data<const Request>(6);
  in.from.slot_bytes = args.stride(2, 0) * 2;
  in.from.columns = args.stride(4, 0);
#if BOXES
  const int64_t slots = args.size(2, 0), parts = args.size(2, 1) * kRowBytes / 128;
  const auto map = [&](CUtensorMap* to, const char* of) {
    return make_box_map(to, of, slots, parts, in.from.slot_bytes, kTile, HEAD_DIM / 64);
  };
  if (map(&in.from.keys, in.from.k) || map(&in.from.values, in.from.v)) return -1;
#endif
  in.chunks = args.data<const Chunk>(5);
  in.partial = args.data<float>(7);
  in.stats = args.data<float2>(8);
  in.arrived = args.data<int>(9);
  in.kv_heads = static_cast<int>(args.size(2, 1));
  in.max_chunks = static_cast<int>(args.size(5, 0));
  in.scale = args.number(10) * 1.4426950408889634f;
  in.q_step = args.stride(0, 0);
  const int64_t blocks = (int64_t{in.max_chunks} * in.kv_heads + WARPS - 1) / WARPS;
  if (BOXES) {
    if (blocks != args.size(11, 1)) return failed("there are not as many claims as blocks");
    const int64_t turn = args.integer(12);
    in.claims = args.data<int>(11) + turn * blocks;
    in.next_claims = args.data<int>(11) + (1 - turn) * blocks;
    in.times = args.data<int64_t>(13);
  }
  if (FUSED) {
    in.q_weight = args.data<const Elem>(11);
    in.k_weight = args.data<const Elem>(12);
    in.eps = args.number(13);
    in.cos_sin = args.data<const float>(14);
  }
  return launch(attention, blocks, 32 * WARPS, kShared, args.stream(), in);
}
