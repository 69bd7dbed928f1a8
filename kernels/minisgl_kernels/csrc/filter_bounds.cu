// top_k, top_p and min_p of each row of logits as one bound, by minisgl/engine/filters.py.
//
// A cluster of blocks takes one row and reads it once. There is no sort: a histogram over the
// whole row, coarse in y, tells in which bin the last token that passes stands; three more, over
// the bits of what is in that bin alone, tell its exact value. Probabilities are summed in fixed
// point, so the order of the sums does not matter.
#include <cooperative_groups.h>

#include "common.cuh"

using namespace minisgl;
namespace cg = cooperative_groups;

namespace {

using T = ELEMENT;

// Macros: ELEMENT, the type of the logits; THREADS of a block.
constexpr int kCluster = 8;
constexpr int kThreads = THREADS;
constexpr int kWarps = kThreads / 32;
constexpr int kBins = 2048;
constexpr int kBinsEach = kBins / kThreads;
constexpr int kLevels = 4;
constexpr float kInfinity = __builtin_huge_valf();
using Mass = unsigned long long;  // of probabilities before normalisation, in units of 2^-40

struct Params {
  const T* logits;
  int64_t stride;
  int vocab, share;
  const float* temperature;
  const int64_t* top_k;  // null: no row has this limit; so for the next two
  const double* top_p;
  const double* min_p;
  float* least;
  int64_t* last;
};

// A bin, and what stands before it: tokens that are larger than all of the bin.
struct Found {
  uint32_t bin, inside, before;
  Mass mass_before;
};

struct Shared {
  uint32_t counts[kBins];
  uint32_t low[kBins], high[kBins];  // halves of masses: sums of 64 bits are not native there
  uint32_t warp_counts[kWarps];
  Mass warp_masses[kWarps];
  float warp_largest[kWarps], largest[kCluster];
  uint32_t equals[kCluster];
  Mass row_mass;
  Found found;
};

// Where a row is cut: after `count` tokens, or where they reach `share` of `total`.
struct Target {
  bool by_mass;
  uint32_t count;
  double share;
  Mass total;  // 0: the whole row's

  __device__ bool reached(uint32_t count_now, Mass mass_now, Mass row) const {
    if (!by_mass) return count_now >= count;
    return static_cast<double>(mass_now) >= share * static_cast<double>(total ? total : row);
  }
};

// What was selected: the value of the last token that passes, as a key; how many tokens and how
// much mass are larger; how many are equal, and how many of these pass.
struct Cut {
  uint32_t key, larger, equal, passing;
  Mass larger_mass;
};

// Keys rise as y falls, from 0 for no number at all.
__device__ float y_of(uint32_t key) { return unordered(~key); }

__device__ Mass mass_of(uint32_t key) {
  return static_cast<Mass>(expf(y_of(key)) * 0x1p40f + 0.5f);  // rounded: large ones are whole
}

__device__ uint32_t coarse_bin(uint32_t key) {
  return static_cast<uint32_t>(fminf(y_of(key) * -64.0f, kBins - 1.0f));
}

__device__ uint32_t fine_bin(uint32_t key, int level) {
  return level == 1 ? key >> 21 : level == 2 ? key >> 10 & 2047 : key & 1023;
}

// Adds to a mass in shared memory, this block's or another's of the cluster.
__device__ void add_mass(uint32_t* low, uint32_t* high, Mass mass) {
  const uint32_t part = static_cast<uint32_t>(mass), before = atomicAdd(low, part);
  const uint32_t rest = static_cast<uint32_t>(mass >> 32) + (before + part < part);
  if (rest) atomicAdd(high, rest);
}

struct Row {
  Shared& s;
  const cg::cluster_group& cluster;
  const uint32_t* keys;
  int rank, count;

  __device__ Mass bin_mass(int bin) const { return Mass{s.high[bin]} << 32 | s.low[bin]; }

  __device__ void clear(int bin) const { s.counts[bin] = 0, s.low[bin] = 0, s.high[bin] = 0; }

  // Adds what this block has of a level to its histogram, if it is in the bins of those before.
  __device__ void fill(int level, uint32_t coarse, uint32_t prefix, bool masses) const {
    const int shift = level == 2 ? 21 : 10;
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const uint32_t key = keys[i];
      const uint32_t rough = coarse_bin(key);
      if (level > 0 && rough != coarse) continue;
      if (level > 1 && key >> shift != prefix) continue;
      const uint32_t bin = level == 0 ? rough : fine_bin(key, level);
      atomicAdd(&s.counts[bin], 1u);
      if (masses) add_mass(&s.low[bin], &s.high[bin], mass_of(key));
    }
    __syncthreads();
  }

  // In which bin of the row's histogram the target is reached. Clears the histogram.
  __device__ Found locate(const Target& target, uint32_t before, Mass mass_before) const {
    if (rank != 0) {
      for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
        if (s.counts[bin] == 0) continue;
        atomicAdd(cluster.map_shared_rank(&s.counts[bin], 0), s.counts[bin]);
        if (const Mass mass = bin_mass(bin)) {
          add_mass(cluster.map_shared_rank(&s.low[bin], 0),
                   cluster.map_shared_rank(&s.high[bin], 0), mass);
        }
        clear(bin);
      }
    }
    cluster.sync();
    if (rank == 0) {
      scan(target, before, mass_before);
      __syncthreads();
      if (threadIdx.x < kCluster && threadIdx.x > 0) {
        *cluster.map_shared_rank(&s.found, threadIdx.x) = s.found;
        *cluster.map_shared_rank(&s.row_mass, threadIdx.x) = s.row_mass;
      }
    }
    cluster.sync();
    return s.found;
  }

  __device__ void scan(const Target& target, uint32_t before, Mass mass_before) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = threadIdx.x * kBinsEach;
    uint32_t mine = 0;
    Mass my_mass = 0;
    for (int i = 0; i < kBinsEach; ++i) mine += s.counts[first + i], my_mass += bin_mass(first + i);
    uint32_t upto = mine;
    Mass mass_upto = my_mass;
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t other = __shfl_up_sync(kAll, upto, step);
      const Mass other_mass = __shfl_up_sync(kAll, mass_upto, step);
      if (lane >= step) upto += other, mass_upto += other_mass;
    }
    if (lane == 31) s.warp_counts[warp] = upto, s.warp_masses[warp] = mass_upto;
    __syncthreads();
    Mass row = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) upto += s.warp_counts[w], mass_upto += s.warp_masses[w];
      row += s.warp_masses[w];
    }
    if (threadIdx.x == 0) s.row_mass = row;
    uint32_t at = before + upto - mine;
    Mass mass_at = mass_before + mass_upto - my_mass;
    for (int i = 0; i < kBinsEach; ++i) {
      const uint32_t inside = s.counts[first + i];
      const Mass mass_inside = bin_mass(first + i);
      clear(first + i);
      if (!target.reached(at, mass_at, row) &&
          target.reached(at + inside, mass_at + mass_inside, row)) {
        s.found = Found{static_cast<uint32_t>(first + i), inside, at, mass_at};
      }
      at += inside, mass_at += mass_inside;
    }
  }

  __device__ Cut select(Target target, bool masses) const {
    Found found{0, 0, 0, 0};
    uint32_t coarse = 0, prefix = 0;
    for (int level = 0; level < kLevels; ++level) {
      fill(level, coarse, prefix, masses);
      found = locate(target, found.before, found.mass_before);
      if (level == 0) {
        coarse = found.bin;
        if (target.total == 0) target.total = s.row_mass;
      } else {
        prefix = level == 1 ? found.bin : prefix << (level == 2 ? 11 : 10) | found.bin;
      }
    }
    Cut cut{prefix, found.before, found.inside, 0, found.mass_before};
    if (!target.by_mass) {
      cut.passing = target.count - cut.larger;
    } else {
      const Mass each = mass_of(cut.key);
      const auto enough = [&](uint32_t n) {
        return target.reached(0, cut.larger_mass + n * each, 0);
      };
      uint32_t low = 0, high = cut.equal;  // enough(high), and not enough(low)
      while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        (enough(middle) ? high : low) = middle;
      }
      cut.passing = high;
    }
    return cut;
  }

  // How many of this block's tokens have the key.
  __device__ uint32_t equals(uint32_t key) const {
    uint32_t found = 0;
    for (int base = 0; base < count; base += kThreads) {
      const int i = base + threadIdx.x;
      found += __popc(__ballot_sync(kAll, i < count && keys[i] == key));
    }
    if (threadIdx.x % 32 == 0) s.warp_counts[threadIdx.x / 32] = found;
    __syncthreads();
    uint32_t all = 0;
    for (int w = 0; w < kWarps; ++w) all += s.warp_counts[w];
    __syncthreads();
    return all;
  }

  // The thread that has the n-th of them in the order of ids gets its place, others -1.
  __device__ int nth_equal(uint32_t key, uint32_t n) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int place = -1;
    for (int base = 0; base < count; base += kThreads) {
      const int i = base + threadIdx.x;
      const bool equal = i < count && keys[i] == key;
      const uint32_t votes = __ballot_sync(kAll, equal);
      if (lane == 0) s.warp_counts[warp] = __popc(votes);
      __syncthreads();
      uint32_t order = __popc(votes & ((1u << lane) - 1)) + 1, all = 0;
      for (int w = 0; w < kWarps; ++w) {
        if (w < warp) order += s.warp_counts[w];
        all += s.warp_counts[w];
      }
      if (equal && order == n) place = i;
      if (n <= all) return place;  // alike in all threads
      n -= all;
      __syncthreads();
    }
    return place;
  }
};

__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 2)
    filter_bounds(const __grid_constant__ Params p) {
  DYNAMIC_SHARED(uint4, dynamic);
  __shared__ Shared s;
  auto* keys = reinterpret_cast<uint32_t*>(dynamic);
  const cg::cluster_group cluster = cg::this_cluster();
  const int rank = static_cast<int>(cluster.block_rank()), row = blockIdx.x / kCluster;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool writes = rank == 0 && threadIdx.x == 0;
  wait_for_previous();
  launch_next();
  const int64_t top_k = p.top_k ? p.top_k[row] : p.vocab;
  const double top_p = p.top_p ? fmax(p.top_p[row], 1e-30) : 1.0;
  const float floor = p.min_p ? static_cast<float>(log(p.min_p[row])) : -kInfinity;
  if (top_k >= p.vocab && top_p >= 1.0) {  // alike in all blocks of the cluster
    if (writes) p.least[row] = floor, p.last[row] = p.vocab;
    return;
  }

  // Another block's shared memory may be written once that block has started.
  cluster.barrier_arrive();
  const int begin = rank * p.share, count = max(min(p.vocab - begin, p.share), 0);
  const T* from = p.logits + row * p.stride + begin;
  float most = -kInfinity;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const float x = to_float(from[i]);
    keys[i] = __float_as_uint(x);
    most = fmaxf(most, x);
  }
  const Row r{s, cluster, keys, rank, count};
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) r.clear(bin);
  most = unordered(__reduce_max_sync(kAll, ordered(most)));
  if (lane == 0) s.warp_largest[warp] = most;
  __syncthreads();
  cluster.barrier_wait();
  if (threadIdx.x < kCluster) {
    for (int w = 0; w < kWarps; ++w) most = fmaxf(most, s.warp_largest[w]);
    *cluster.map_shared_rank(&s.largest[rank], threadIdx.x) = most;
  }
  cluster.sync();
  for (int i = 0; i < kCluster; ++i) most = fmaxf(most, s.largest[i]);
  const float temperature = p.temperature[row];
  for (int i = threadIdx.x; i < count; i += kThreads) {
    keys[i] = ~ordered(__fdiv_rn(__fsub_rn(__uint_as_float(keys[i]), most), temperature));
  }
  // Each thread reads its own keys alone until `equals`, which comes after barriers.

  Target target{false, static_cast<uint32_t>(top_k), top_p, 0};
  Cut cut{};
  if (top_k < p.vocab) {
    cut = r.select(target, top_p < 1.0);
    target.total = cut.larger_mass + cut.passing * mass_of(cut.key);
  }
  if (top_p < 1.0) {
    target.by_mass = true;
    cut = r.select(target, true);
  }
  const float least = y_of(cut.key);
  if (floor > least || cut.passing == cut.equal) {
    if (writes) p.least[row] = fmaxf(least, floor), p.last[row] = p.vocab;
    cluster.sync();  // no block ends while others may still write to it
    return;
  }
  const uint32_t mine = r.equals(cut.key);
  if (threadIdx.x < kCluster) *cluster.map_shared_rank(&s.equals[rank], threadIdx.x) = mine;
  cluster.sync();
  uint32_t before = 0;
  for (int i = 0; i < rank; ++i) before += s.equals[i];
  if (writes) p.least[row] = least;
  if (cut.passing > before && cut.passing <= before + mine) {
    const int place = r.nth_equal(cut.key, cut.passing - before);
    if (place >= 0) p.last[row] = begin + place;
  }
}

}  // namespace

// (least [B] float32, last [B] int64, logits [B, V], temperature [B] float32, top_k [B] int64 or
//  None, top_p [B] float64 or None, min_p [B] float64 or None)
EXPORT(filter_bounds) {
  Params p = {};
  p.least = args.data<float>(0);
  p.last = args.data<int64_t>(1);
  p.logits = args.data<const T>(2);
  p.stride = args.stride(2, 0);
  p.vocab = static_cast<int>(args.size(2, 1));
  p.share = (p.vocab + kCluster - 1) / kCluster;
  p.temperature = args.data<const float>(3);
  p.top_k = args.data<const int64_t>(4);
  p.top_p = args.data<const double>(5);
  p.min_p = args.data<const double>(6);
  const int shared = (p.share + 3) / 4 * 16;
  static int granted = 16 * 1024;  // of the one device that this process uses
  if (shared > granted) {
    const int error = check(cudaFuncSetAttribute(
        filter_bounds, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    if (error) return error;
    granted = shared;
  }
  return launch(filter_bounds, args.size(2, 0) * kCluster, kThreads, shared, args.stream(), p);
}
