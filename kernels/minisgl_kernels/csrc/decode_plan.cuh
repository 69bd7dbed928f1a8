// Who computes which tiles of a decode step: tiles of 16 tokens of all requests stand on one axis,
// cut into chunks, which are equal or have given shares.
#pragma once

#include "common.cuh"

namespace minisgl {

constexpr int kTile = 16;  // tokens

// A request: its first tile on the axis, its tokens, its row of the page table, and the first and
// last chunk that have tiles of it (16 bits each).
struct alignas(16) Request {
  int first, tokens, row, chunks;
  __device__ int end() const { return first + (tokens + kTile - 1) / kTile; }
};

// A chunk: tiles [start, end) of the axis; `index` is the request that the first one belongs to.
struct alignas(16) Chunk {
  int index, start, end, unused;
  Request request;
};

constexpr int kPlanThreads = 1024;

// A warp takes its tiles one after the other, and then one warp the parts of a request: so little
// work that not all warps are needed is cut into about sqrt(balance * longest / GROUP) parts.
__device__ int tiles_of_chunk(int longest, int balance) {
  int least = 1;
  while (balance * least * least < longest * GROUP) ++least;
  return least;
}

// With so many tiles in each, chunks have their shares: with few, a start takes longer than they.
constexpr int kManyTiles = 8;

// One block. `chunks` [max_chunks] and `requests` [batch + 1] are written, and `claims` cleared.
// `shares` [max_chunks + 1]: the sum of those of all chunks before; null: all are equal.
__global__ void __launch_bounds__(kPlanThreads)
    plan(const int* lens, const int* rows, const int* shares, Chunk* chunks, Request* requests,
         int* claims, int claim_count, int batch, int max_chunks, int balance) {
  DYNAMIC_SHARED(int, first);  // [batch + 1] first tile of each request, and of all
  int* const starts = first + batch + 1;  // [max_chunks + 1] the same of chunks
  __shared__ int warp_sums[kPlanThreads / 32], warp_longest[kPlanThreads / 32];
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  wait_for_previous();  // and no `launch_next`: see `attention`
  const int each = (batch + kPlanThreads - 1) / kPlanThreads;
  const int begin = min(thread * each, batch), stop = min(begin + each, batch);
  int sum = 0, longest = 0;
  for (int i = begin; i < stop; ++i) {
    const int count = (lens[i] + kTile - 1) / kTile;
    sum += count;
    longest = max(longest, count);
  }
  int before = sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAll, before, step);
    if (lane >= step) before += other;
    longest = max(longest, __shfl_xor_sync(kAll, longest, step));
  }
  if (lane == 31) warp_sums[warp] = before;
  if (lane == 31) warp_longest[warp] = longest;
  __syncthreads();
  before -= sum;
  for (int w = 0; w < warp; ++w) before += warp_sums[w];
  for (int i = begin; i < stop; ++i) {
    first[i] = before;
    before += (lens[i] + kTile - 1) / kTile;
  }
  if (begin < stop && stop == batch) first[batch] = before;
  __syncthreads();
  for (int w = 0; w < kPlanThreads / 32; ++w) longest = max(longest, warp_longest[w]);
  const int tiles = first[batch];
  const int least = tiles_of_chunk(longest, balance);
  const int count = min(max_chunks, (tiles + least - 1) / least);
  const bool shared_out = shares != nullptr && count == max_chunks && tiles >= kManyTiles * count;
  for (int c = thread; c <= count; c += kPlanThreads) {
    starts[c] = static_cast<int>(shared_out ? int64_t{tiles} * shares[c] / shares[count]
                                            : int64_t{tiles} * c / count);
  }
  for (int i = thread; i < claim_count; i += kPlanThreads) claims[i] = 0;
  __syncthreads();
  // The last one of some that stands at this tile or before.
  const auto last_at = [](const int* stands, int some, int tile) {
    int low = 0, high = some - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (stands[middle] <= tile) low = middle; else high = middle - 1;
    }
    return low;
  };
  const auto request = [&](int i) {
    return Request{first[i], lens[i], rows[i],
                   last_at(starts, count, first[i]) << 16 |
                       last_at(starts, count, first[i + 1] - 1)};
  };
  for (int i = thread; i < batch; i += kPlanThreads) requests[i] = request(i);
  if (thread == 0) requests[batch] = Request{tiles, 0, 0, 0};
  for (int c = thread; c < max_chunks; c += kPlanThreads) {
    Chunk chunk = {};
    if (c < count) {
      chunk.start = starts[c];
      chunk.end = starts[c + 1];
      chunk.index = last_at(first, batch, chunk.start);
      chunk.request = request(chunk.index);
    }
    chunks[c] = chunk;
  }
  __threadfence();
}

__device__ inline Request load(const Request* from) {
  const int4 x = __ldcg(reinterpret_cast<const int4*>(from));
  return Request{x.x, x.y, x.z, x.w};
}
__device__ inline Chunk load(const Chunk* from) {
  const int4 x = __ldcg(reinterpret_cast<const int4*>(from));
  return Chunk{x.x, x.y, x.z, x.w, load(&from->request)};
}

}  // namespace minisgl
