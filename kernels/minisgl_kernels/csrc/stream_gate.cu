// silu(x W_gate^T) * x W_up^T for up to 256 tokens and weights so large that their bytes decide, on
// Hopper. Each multiprocessor has one block, and all have the same share of the weights: a block
// goes on from one tile to the next in the middle of the K dimension, and its copies run ahead of
// its sums across tiles. So there is no last round in which most have nothing to do.
//
// The rows of a tile alternate by eights between gate and up, so that a thread's accumulators have
// both for the same output. A tile that two or more blocks share is finished by the one that has its
// first part: that comes last in its share, while the others have theirs first, and leave them in
// `partials` with a flag in `done`, which is taken down by who reads them.
#include "hopper.cuh"

using namespace minisgl;

namespace {

using T = __nv_bfloat16;

// Macros: TOKENS (a multiple of 8 to 256), GROUPS.
constexpr int kRows = 64 * GROUPS;
constexpr int kOutputs = kRows / 2;
constexpr int kWorkers = 128 * GROUPS;  // threads that multiply; one more warp copies
constexpr int kThreads = kWorkers + 32;
constexpr int kRowBytes = kChunk * 2;
constexpr int kStageBytes = (kRows + TOKENS) * kRowBytes;
constexpr int kMostStages = (232448 - 1024 - 1024 - 256) / kStageBytes;
constexpr int kStages = kMostStages < 16 ? kMostStages : 16;
constexpr int kSharedBytes = kStages * kStageBytes + 1024 + 1024 + 256;  // alignment, scales, barriers
constexpr int kQuads = TOKENS / 8;  // of accumulators of a thread
static_assert(kStages >= 2, "a stage is read while the next one comes");

struct Arguments {
  T* out;
  const float* squares;
  float* partials;
  int* done;
  float eps;
  int tokens, width, k, parts, tiles;
};

__device__ inline void sync_workers() { sync_threads_of<kWorkers>(); }

__global__ void __launch_bounds__(kThreads, 1)
    stream_gate(const __grid_constant__ CUtensorMap weight_map,
                const __grid_constant__ CUtensorMap token_map, const Arguments of) {
  DYNAMIC_SHARED(char, memory);
  const uint32_t start = (shared_address(memory) + 1023) / 1024 * 1024;
  float* const scales =
      reinterpret_cast<float*>(memory + (start - shared_address(memory)) + kStages * kStageBytes);
  const uint32_t full = start + kStages * kStageBytes + 256 * 4, empty = full + kStages * 8;

  launch_next();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int chunks = of.k / kChunk;
  // The first blocks have the last shares: whoever waits for a part waits for an earlier block.
  const int64_t all = int64_t{of.tiles} * chunks, share = gridDim.x - 1 - blockIdx.x;
  const int begin = static_cast<int>(all * share / gridDim.x);
  const int end = static_cast<int>(all * (share + 1) / gridDim.x);

  auto copy_weights = [&](int at, int stage) {
    const uint32_t barrier = full + stage * 8;
    arrive_expecting(barrier, kStageBytes);
    copy_gate_tile(start + stage * kStageBytes, &weight_map, at / chunks * (kOutputs / 8),
                   at % chunks * kChunk, barrier);
  };
  auto copy_tokens = [&](int at, int stage) {
    copy_tile(start + stage * kStageBytes + kRows * kRowBytes, &token_map, 0,
              at % chunks * kChunk, full + stage * 8);
  };

  const int ahead = end - begin < kStages ? end - begin : kStages;
  if (warp == kWorkers / 32 && lane == 0) {
    prefetch_map(&weight_map);
    prefetch_map(&token_map);
    for (int i = 0; i < kStages; ++i) {
      make_barrier(full + i * 8, 1);
      make_barrier(empty + i * 8, 4 * GROUPS);
    }
    publish_barriers();
    for (int i = 0; i < ahead; ++i) copy_weights(begin + i, i);
  }
  __syncthreads();
  wait_for_previous();

  if (warp == kWorkers / 32) {
    if (lane == 0) {
      publish_memory();  // x, which the kernel before may have written
      for (int i = 0; i < ahead; ++i) copy_tokens(begin + i, i);
      uint32_t parity = 0;
      for (int at = begin + ahead, stage = 0; at < end; ++at) {
        wait_barrier(empty + stage * 8, parity);
        copy_weights(at, stage);
        copy_tokens(at, stage);
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
    }
    return;
  }

  for (int token = threadIdx.x / 4; token < TOKENS; token += kWorkers / 4) {  // four lanes a token
    float sum = 0.0f;
    if (of.squares != nullptr && token < of.tokens) {
#pragma unroll 4
      for (int i = lane % 4; i < of.parts; i += 4) sum += of.squares[token * of.parts + i];
    }
    sum = group_sum<4>(sum);
    if (lane % 4 == 0) scales[token] = of.squares == nullptr ? 1.0f : rsqrtf(sum / of.k + of.eps);
  }
  sync_workers();

  float sum[TOKENS / 2];
  uint32_t parity = 0;
  int stage = 0;
  for (int at = begin; at < end;) {
    const int tile = at / chunks, first = at % chunks;
    const int stop = (tile + 1) * chunks < end ? (tile + 1) * chunks : end;
#pragma unroll
    for (int i = 0; i < TOKENS / 2; ++i) sum[i] = 0.0f;
    int last = -1;
    for (; at < stop; ++at) {
      wait_barrier(full + stage * 8, parity);
      const uint64_t a = operand(start + stage * kStageBytes + warp / 4 * 64 * kRowBytes);
      const uint64_t b = operand(start + stage * kStageBytes + kRows * kRowBytes);
      begin_products();
#pragma unroll
      for (int part = 0; part < kChunk / 16; ++part) {
        multiply<TOKENS / 8>(sum, a + 2 * part, b + 2 * part);
      }
      end_products();
      wait_products<1>();
      if (last >= 0 && lane == 0) arrive(empty + last * 8);
      last = stage;
      if (++stage == kStages) stage = 0, parity ^= 1;
    }
    wait_products<0>();
    if (lane == 0) arrive(empty + last * 8);

    // Four accumulators at a time, those of all workers next to each other.
    auto part_of = [&](int64_t block) {
      return reinterpret_cast<float4*>(of.partials + block * (kRows * TOKENS)) + threadIdx.x;
    };
    if (first > 0) {  // another block has the tile's beginning
      float4* const to = part_of(blockIdx.x);
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        __stcg(to + q * kWorkers, make_float4(sum[4 * q], sum[4 * q + 1], sum[4 * q + 2],
                                              sum[4 * q + 3]));
      }
      __threadfence();
      sync_workers();
      if (threadIdx.x == 0) store_flag(of.done + blockIdx.x, 1);
      continue;
    }
    // Parts of the rest, in their order, are of the blocks before this one.
    int64_t reached = stop;
    for (int block = blockIdx.x - 1; reached < int64_t{tile + 1} * chunks; --block) {
      if (threadIdx.x == 0) {
        while (load_flag(of.done + block) == 0) {
        }
        store_flag(of.done + block, 0);
      }
      sync_workers();
      const float4* const from = part_of(block);
#pragma unroll
      for (int q = 0; q < kQuads; ++q) {
        const float4 other = __ldcg(from + q * kWorkers);
        sum[4 * q] += other.x, sum[4 * q + 1] += other.y;
        sum[4 * q + 2] += other.z, sum[4 * q + 3] += other.w;
      }
      reached = all * (gridDim.x - block) / gridDim.x;
    }

    // Accumulators 4 q and 4 q + 1 are a gate's for two tokens, the other two its partner's.
    const int output = tile * kOutputs + warp * 8 + lane / 4;
    const bool odd = lane / 4 % 2 == 1;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const int token = q * 8 + lane % 4 * 2;
      T mine[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float scale = scales[token + i];
        const float gate = sum[4 * q + i] * scale, up = sum[4 * q + 2 + i] * scale;
        mine[i] = from_float<T>(gate / (1.0f + __expf(-gate)) * up);
      }
      // A thread and its neighbour of the next output trade, so that each has two of one token.
      const T given = odd ? mine[0] : mine[1], kept = odd ? mine[1] : mine[0];
      const T taken = __shfl_xor_sync(kAll, given, 4);
      Vec<T, 2> two;
      two.of[0] = odd ? taken : kept;
      two.of[1] = odd ? kept : taken;
      const int64_t row = token + odd;
      if (row < of.tokens && output < of.width) two.store(of.out + row * of.width + output - odd);
    }
  }
}

}  // namespace

// (out [M, N / 2], x [M, K], w [N, K], squares [M, parts] or None, eps, partials [blocks, 64 GROUPS
//  TOKENS], done [blocks] zeros). A block for each of `done`.
EXPORT(stream_gate) {
  Arguments of = {};
  of.out = args.data<T>(0);
  of.squares = args.data<const float>(3);
  of.eps = args.number(4);
  of.partials = args.data<float>(5);
  of.done = args.data<int>(6);
  of.tokens = static_cast<int>(args.size(1, 0));
  of.k = static_cast<int>(args.size(1, 1));
  of.width = static_cast<int>(args.size(2, 0)) / 2;
  of.parts = of.squares != nullptr ? static_cast<int>(args.size(3, 1)) : 0;
  of.tiles = (of.width + kOutputs - 1) / kOutputs;
  static bool raised = false;
  if (!raised) {
    if (check(cudaFuncSetAttribute(stream_gate, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   kSharedBytes))) {
      return -1;
    }
    raised = true;
  }
  CUtensorMap weight_map, token_map;
  if (make_gate_map(&weight_map, args.data<const void>(2), of.width, of.k, kOutputs)) return -1;
  if (make_map(&token_map, args.data<const void>(1), of.tokens, of.k, TOKENS)) return -1;
  return launch(stream_gate, args.size(6, 0), kThreads, kSharedBytes, args.stream(), weight_map,
                token_map, of);
}
