// Few tokens times a weight matrix: out[M, N] = x[M, K] W[N, K]^T for M up to 64, in the time that
// reading W takes.
//
// A block has 8 or 16 rows of W, its warps share the K dimension, and tensor cores multiply:
// mma.m16n8k16 with tokens as its 16 rows and 8 rows of W as its columns. The order of k within a
// product does not matter as long as both sides have the same, so a thread takes its 8 elements of
// 32 k with one load of 16 bytes, of W and of x alike, and no shared memory lies between.
//
// W does not depend on the kernel before: each warp has its first loads under way before it waits,
// so with programmatic dependent launch the weights come while the kernel before ends.
//
// NORM: x is normalised first: out = rms(x) * (x * norm_weight) W^T, with the factor rms(x) of each
// token applied at the end. MODE 0 stores (with bias, if any), 1 adds to out in place (a residual),
// 2 stores silu(gate) * up, where W holds N / 2 rows of gate and then those of up.
#include "common.cuh"
#include "tensor_core.cuh"

using namespace minisgl;

namespace {

using T = ELEMENT;

// Macros: ELEMENT, NORM, MODE.
constexpr int kMaxWarps = 8;

template <class E>
struct Two_ { using type = __half2; };
template <>
struct Two_<__nv_bfloat16> { using type = __nv_bfloat162; };
using Two = Two_<T>::type;

// Two products at once, each rounded once.
__device__ inline uint32_t times(uint32_t a, uint32_t b) {
  const Two both = __hmul2(*reinterpret_cast<const Two*>(&a), *reinterpret_cast<const Two*>(&b));
  return *reinterpret_cast<const uint32_t*>(&both);
}

__device__ inline uint4 load_once(const T* from) {  // weights: read once, kept in no cache near
#ifdef __CUDA_ARCH__
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
#else
  return *reinterpret_cast<const uint4*>(from);
#endif
}

__device__ inline uint4 scaled(const uint4& x, const uint4& weight) {
  return make_uint4(times(x.x, weight.x), times(x.y, weight.y),
                    times(x.z, weight.z), times(x.w, weight.w));
}

// TT: groups of 8 tokens. R: groups of 8 rows of W; with MODE 2 half of them are rows of gate.
template <int TT, int R>
__global__ void __launch_bounds__(kMaxWarps * 32)
    skinny_linear(T* out, const T* x, const T* w, const T* norm_weight, const T* bias, float eps,
                  int tokens, int rows, int k) {
  constexpr int kUnroll = 8 / R;          // products of 32 k whose weights are under way at once
  constexpr int kBatch = 8 / TT < kUnroll ? 8 / TT : kUnroll;  // and those whose tokens are
  constexpr int kTiles = (TT + 1) / 2;    // of 16 tokens
  constexpr int kOutputs = MODE == 2 ? 4 * R : 8 * R;  // of a block, for each token
  constexpr int kParts = TT == 1 ? 2 : 4;  // of the accumulators that are in use
  __shared__ float sums[kMaxWarps][kTiles * R * kParts][32];
  __shared__ float squares_of[kMaxWarps][TT * 8];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int group = lane / 4, quad = lane % 4;
  const int half = rows / 2;  // MODE 2: rows of gate
  const int columns = k / 32;
  const T* from[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    int row = (blockIdx.x * R + r) * 8 + group;
    if (MODE == 2) {
      const int at = blockIdx.x * kOutputs + group % kOutputs;
      row = at < half ? at + (R == 2 ? r : group / kOutputs) * half : 0;
    }
    if (row >= rows) row = 0;  // read for nothing, and not stored
    from[r] = w + static_cast<int64_t>(row) * k + quad * 8;
  }
  const uint4 none = make_uint4(0, 0, 0, 0);
  uint4 next[R][kUnroll];
  auto fetch = [&](int first) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int column = first + u * warps;
#pragma unroll
      for (int r = 0; r < R; ++r) {
        next[r][u] = column < columns ? load_once(from[r] + column * 32) : none;
      }
    }
  };
  fetch(warp);
  wait_for_previous();
  launch_next();

  float sum[kTiles][R][4] = {};
  float squares[TT][4] = {};  // products of tokens with each other: the diagonal is wanted
  for (int first = warp; first < columns; first += kUnroll * warps) {
    uint4 weights[R][kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int r = 0; r < R; ++r) weights[r][u] = next[r][u];
    }
    if (first + kUnroll * warps < columns) fetch(first + kUnroll * warps);
#pragma unroll
    for (int batch = 0; batch < kUnroll; batch += kBatch) {
      // All loads of a batch before the first use: one after the other they would take its time
      // for each. No branch stands between them, and what lies behind the end is zero.
      uint4 mine[kBatch][TT], scales[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const int column = first + (batch + u) * warps, at = column * 32 + quad * 8;
        const bool inside = column < columns;
#pragma unroll
        for (int t = 0; t < TT; ++t) {
          const int token = t * 8 + group;
          const T* place = x + static_cast<int64_t>(token) * k + at;
          mine[u][t] =
              inside && token < tokens ? *reinterpret_cast<const uint4*>(place) : none;
        }
        if (NORM) scales[u] = inside ? *reinterpret_cast<const uint4*>(norm_weight + at) : none;
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        uint4(&now)[TT] = mine[u];
        if (NORM) {
#pragma unroll
          for (int t = 0; t < TT; ++t) {
            // What a thread holds of 8 tokens is the same whether they are rows or columns.
            const uint32_t a0[4] = {now[t].x, 0, now[t].y, 0}, a1[4] = {now[t].z, 0, now[t].w, 0};
            product<T>(squares[t], a0, now[t].x, now[t].y);
            product<T>(squares[t], a1, now[t].z, now[t].w);
            now[t] = scaled(now[t], scales[u]);
          }
        }
#pragma unroll
        for (int m = 0; m < kTiles; ++m) {
          const uint4 low = now[2 * m], high = 2 * m + 1 < TT ? now[(2 * m + 1) % TT] : none;
          const uint32_t a0[4] = {low.x, high.x, low.y, high.y};
          const uint32_t a1[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
          for (int r = 0; r < R; ++r) {
            const uint4& part = weights[r][batch + u];
            product<T>(sum[m][r], a0, part.x, part.y);
            product<T>(sum[m][r], a1, part.z, part.w);
          }
        }
      }
    }
  }

#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) sums[warp][(m * R + r) * kParts + i][lane] = sum[m][r][i];
    }
  }
  if (NORM) {
#pragma unroll
    for (int t = 0; t < TT; ++t) {  // row `group` and columns 2 quad, 2 quad + 1
      if (group == 2 * quad) squares_of[warp][t * 8 + group] = squares[t][0];
      if (group == 2 * quad + 1) squares_of[warp][t * 8 + group] = squares[t][1];
    }
  }
  __syncthreads();

  // A thread an output; neighbours have neighbouring rows of one token.
  const int stored = MODE == 2 ? half : rows;
  for (int i = threadIdx.x; i < tokens * kOutputs; i += blockDim.x) {
    const int token = i / kOutputs, at = i % kOutputs;
    const int row = blockIdx.x * kOutputs + at;
    if (row >= stored) continue;
    // Where the accumulators of a product have this token and this row: see the PTX manual.
    auto total = [&](int column) {  // of the 8 R that the block has rows for
      const int part = (token / 8 % 2) * 2 + column % 2, place = token % 8 * 4 + column % 8 / 2;
      float all = 0.0f;
      for (int v = 0; v < warps; ++v) {
        all += sums[v][(token / 16 * R + column / 8) * kParts + part][place];
      }
      return all;
    };
    float factor = 1.0f;
    if (NORM) {
      float all = 0.0f;
      for (int v = 0; v < warps; ++v) all += squares_of[v][token];
      factor = rsqrtf(all / k + eps);
    }
    T* to = out + static_cast<int64_t>(token) * stored + row;
    if (MODE == 2) {
      const float gate = total(at) * factor, up = total(kOutputs + at) * factor;
      *to = from_float<T>(gate / (1.0f + __expf(-gate)) * up);
    } else {
      float value = total(at) * factor;
      if (bias != nullptr) value += to_float(bias[row]);
      if (MODE == 1) value += to_float(*to);
      *to = from_float<T>(value);
    }
  }
}

template <int TT, int R>
int run(Args args) {
  const int tokens = args.size(1, 0), k = args.size(1, 1), rows = args.size(2, 0);
  const int outputs = MODE == 2 ? 4 * R : 8 * R, stored = MODE == 2 ? rows / 2 : rows;
  const int warps = args.integer(7);
  return launch(skinny_linear<TT, R>, (stored + outputs - 1) / outputs, warps * 32, 0,
                args.stream(), args.data<T>(0), args.data<const T>(1), args.data<const T>(2),
                args.data<const T>(3), args.data<const T>(4), args.number(5), tokens, rows, k);
}

}  // namespace

// (out [M, N], x [M, K], w [N, K], norm_weight [K] or None, bias [N] or None, eps, wide, warps)
EXPORT(skinny_linear) {
  const int tokens = args.size(1, 0);
  const bool wide = args.integer(6) != 0;
  if (tokens <= 8) return wide ? run<1, 2>(args) : run<1, 1>(args);
  if (tokens <= 16) return wide ? run<2, 2>(args) : run<2, 1>(args);
  if (tokens <= 32) return wide ? run<4, 2>(args) : run<4, 1>(args);
  return wide ? run<8, 2>(args) : run<8, 1>(args);
}
