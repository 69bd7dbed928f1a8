// From the QKV product to attention in one pass: norm of query and key heads, rotary embedding,
// keys and values to their slots, queries together. A group of lanes for each head of each token,
// 8 elements a lane.
#include "common.cuh"

using namespace minisgl;

namespace {

using T = ELEMENT;

// Macros: ELEMENT, DIM (of a head, a multiple of 16 up to 256), NORM.
constexpr int kWidth = 8;
constexpr int kLanes = DIM / kWidth;
constexpr int kGroup = kLanes <= 8 ? 8 : kLanes <= 16 ? 16 : 32;
constexpr int kThreads = 128;
constexpr int kManyTokens = 1024;
using Access = Vec<T, kWidth>;

// HEADS: neighbouring heads of a token that a group takes one after the other. With several, a
// group reads the angles once for all; with one, there are more groups for few tokens.
template <class Index, int HEADS>
__global__ void __launch_bounds__(kThreads)
    qk_rope_store(T* q, const T* qkv, const T* q_weight, const T* k_weight, float eps,
                  const float* cos_sin, const Index* positions, const Index* out_loc, T* k_slots,
                  T* v_slots, int64_t items, int q_heads, int kv_heads, int64_t token_step,
                  int64_t slot_step) {
  const int64_t item = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kGroup;
  const int lane = threadIdx.x % kGroup;
  const int heads = q_heads + 2 * kv_heads, rotated = q_heads + kv_heads;
  const int parts = (heads + HEADS - 1) / HEADS;
  const int64_t token = item / parts;
  const int begin = static_cast<int>(item - token * parts) * HEADS;
  // Lanes beyond the head, and groups beyond the last item, take part in shuffles only.
  const bool works = item < items && lane < kLanes;
  wait_for_previous();
  launch_next();

  Access value[HEADS] = {};
  float angle[2][kWidth] = {};
  int64_t slot = 0;
  if (works) {
    const T* from = qkv + token * token_step + int64_t{begin} * DIM + lane * kWidth;
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      if (begin + h < heads) value[h] = Access::load(from + h * DIM);
    }
    if (begin + HEADS > q_heads) slot = out_loc[token];
    if (begin < rotated) {
      const float* row = cos_sin + static_cast<int64_t>(positions[token]) * DIM;
      const int pair = lane * kWidth % (DIM / 2);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto part = Vec<float, kWidth>::load(row + i * (DIM / 2) + pair);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) angle[i][j] = part.of[j];
      }
    }
  }
  const bool first = lane < kLanes / 2;
  const int partner = first ? lane + kLanes / 2 : lane - kLanes / 2;
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
    const int head = begin + h;
    const bool is_query = head < q_heads, is_value = head >= rotated;
    float x[kWidth];
#pragma unroll
    for (int j = 0; j < kWidth; ++j) x[j] = to_float(value[h].of[j]);
    if (NORM) {
      float squares = 0.0f;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) squares = fmaf(x[j], x[j], squares);
      const float factor = rsqrtf(group_sum<kGroup>(squares) / DIM + eps);
      if (works && !is_value) {
        const auto scale = Access::load((is_query ? q_weight : k_weight) + lane * kWidth);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) x[j] = x[j] * factor * to_float(scale.of[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float other = __shfl_sync(kAll, x[j], partner, kGroup);
      const float turned = x[j] * angle[0][j] + (first ? -other : other) * angle[1][j];
      if (!is_value) value[h].of[j] = from_float<T>(turned);
    }
    if (!works || head >= heads) continue;
    if (is_query) {
      value[h].store(q + (token * q_heads + head) * DIM + lane * kWidth);
    } else if (slot >= 0) {
      T* slots = is_value ? v_slots : k_slots;
      const int place = head - q_heads - (is_value ? kv_heads : 0);
      value[h].store(slots + slot * slot_step + int64_t{place} * DIM + lane * kWidth);
    }
  }
}

template <class Index, int HEADS>
int run(Args args) {
  const int q_heads = static_cast<int>(args.integer(10));
  const int kv_heads = static_cast<int>(args.integer(11));
  const int64_t items = args.size(1, 0) * ((q_heads + 2 * kv_heads + HEADS - 1) / HEADS);
  const int64_t slot_step = args.stride(8, 0);
  uint64_t all = address(args.data<void>(0)) | address(args.data<void>(1));
  for (int i : {2, 3, 5, 8, 9}) all |= address(args.data<void>(i));
  all |= (args.stride(1, 0) | slot_step) * sizeof(T);
  if (all % 16) return failed("qk_rope_store needs rows that start at multiples of 16 bytes");
  const int64_t groups = kThreads / kGroup;
  return launch(qk_rope_store<Index, HEADS>, (items + groups - 1) / groups, kThreads, 0,
                args.stream(), args.data<T>(0), args.data<const T>(1), args.data<const T>(2),
                args.data<const T>(3), args.number(4), args.data<const float>(5),
                args.data<const Index>(6), args.data<const Index>(7), args.data<T>(8),
                args.data<T>(9), items, q_heads, kv_heads, args.stride(1, 0), slot_step);
}

template <class Index>
int run_either(Args args) {
  return args.size(1, 0) >= kManyTokens ? run<Index, 4>(args) : run<Index, 1>(args);
}

}  // namespace

// (q [T, hq, d], qkv [T, (hq + 2 hkv) d], q_weight [d] or None, k_weight, eps, cos_sin [n, d],
//  positions [T], out_loc [T], k_slots [slots, hkv, d], v_slots, hq, hkv)
EXPORT(qk_rope_store) { return args.wide(6) ? run_either<int64_t>(args) : run_either<int32_t>(args); }
