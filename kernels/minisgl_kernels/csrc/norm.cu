// Root mean square norm of rows, with or without adding to a residual first. One block a row.
#include "common.cuh"

using namespace minisgl;

namespace {

using T = ELEMENT;

// Macros: ELEMENT, HIDDEN, WIDTH (elements an access), ITEMS (accesses a thread), THREADS.
using Access = Vec<T, WIDTH>;

__device__ float block_sum(float x) {
  __shared__ float sums[32];
  x = group_sum<32>(x);
  if (THREADS <= 32) return x;
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  return group_sum<32>(lane < THREADS / 32 ? sums[lane] : 0.0f);
}

template <bool ADD>
__global__ void __launch_bounds__(THREADS)
    rms_norm(T* out, const T* x, T* residual, const T* weight, float eps) {
  const int64_t row = int64_t{blockIdx.x} * HIDDEN;
  Access value[ITEMS], scale[ITEMS];
  // Weights never change, so they may be read before the kernel before has ended.
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int at = (i * THREADS + threadIdx.x) * WIDTH;
    if (at < HIDDEN) scale[i] = Access::load(weight + at);
  }
  wait_for_previous();
  launch_next();
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int at = (i * THREADS + threadIdx.x) * WIDTH;
    if (at < HIDDEN) value[i] = Access::load(x + row + at);
  }
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int at = (i * THREADS + threadIdx.x) * WIDTH;
    if (at >= HIDDEN) continue;
    if (ADD) {
      const Access old = Access::load(residual + row + at);
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) {  // rounded here, as what is kept is
        value[i].of[j] = from_float<T>(to_float(old.of[j]) + to_float(value[i].of[j]));
      }
      value[i].store(residual + row + at);
    }
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
      const float f = to_float(value[i].of[j]);
      squares = fmaf(f, f, squares);
    }
  }
  const float factor = rsqrtf(block_sum(squares) / HIDDEN + eps);
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int at = (i * THREADS + threadIdx.x) * WIDTH;
    if (at >= HIDDEN) continue;
    Access done;
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
      done.of[j] = from_float<T>(to_float(value[i].of[j]) * factor * to_float(scale[i].of[j]));
    }
    done.store(out + row + at);
  }
}

bool aligned(Args args, int tensors) {
  uint64_t all = 0;
  for (int i = 0; i < tensors; ++i) all |= address(args.data<void>(i));
  return all % alignof(Access) == 0;
}

constexpr char kMisaligned[] = "rms_norm needs tensors whose data starts at multiples of 16 bytes";

}  // namespace

// (out [T, H], x [T, H], weight [H], eps)
EXPORT(rms_norm) {
  if (!aligned(args, 3)) return failed(kMisaligned);
  return launch(rms_norm<false>, args.size(0, 0), THREADS, 0, args.stream(), args.data<T>(0),
                args.data<const T>(1), static_cast<T*>(nullptr), args.data<const T>(2),
                args.number(3));
}

// (out [T, H], x [T, H], residual [T, H], weight [H], eps)
EXPORT(add_rms_norm) {
  if (!aligned(args, 4)) return failed(kMisaligned);
  return launch(rms_norm<true>, args.size(0, 0), THREADS, 0, args.stream(), args.data<T>(0),
                args.data<const T>(1), args.data<T>(2), args.data<const T>(3), args.number(4));
}
