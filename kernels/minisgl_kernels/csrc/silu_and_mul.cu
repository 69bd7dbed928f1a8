// silu(gate) * up of a gated MLP, where a row holds gate and up one after the other.
#include "common.cuh"

using namespace minisgl;

namespace {

using T = ELEMENT;

// Macros: ELEMENT, WIDTH_OF_ROW (of gate, up and the result).
constexpr int kThreads = 128;

template <int N>
__global__ void __launch_bounds__(kThreads) silu_and_mul(T* out, const T* x, int blocks_of_row) {
  const int64_t row = blockIdx.x / blocks_of_row;
  const int at = ((blockIdx.x - row * blocks_of_row) * kThreads + threadIdx.x) * N;
  wait_for_previous();
  launch_next();
  if (at >= WIDTH_OF_ROW) return;
  const T* from = x + row * (2 * WIDTH_OF_ROW) + at;
  const auto gate = Vec<T, N>::load(from), up = Vec<T, N>::load(from + WIDTH_OF_ROW);
  Vec<T, N> done;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float g = to_float(gate.of[j]);
    done.of[j] = from_float<T>(g / (1.0f + __expf(-g)) * to_float(up.of[j]));
  }
  done.store(out + row * WIDTH_OF_ROW + at);
}

template <int N>
int run(Args args) {
  const int blocks_of_row = (WIDTH_OF_ROW + kThreads * N - 1) / (kThreads * N);
  return launch(silu_and_mul<N>, args.size(0, 0) * blocks_of_row, kThreads, 0, args.stream(),
                args.data<T>(0), args.data<const T>(1), blocks_of_row);
}

}  // namespace

// (out [T, w], x [T, 2 w])
EXPORT(silu_and_mul) {
  const uint64_t all = address(args.data<void>(0)) | address(args.data<void>(1));
  const int bytes = access_bytes(all | WIDTH_OF_ROW * sizeof(T));
  if (bytes == 16) return run<16 / sizeof(T)>(args);
  if (bytes >= 2 * sizeof(T)) return run<2>(args);
  return run<1>(args);
}
