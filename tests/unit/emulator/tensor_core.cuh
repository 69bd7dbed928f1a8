// In the place of csrc/tensor_core.cuh: the same functions, by the layouts of the PTX manual.
#pragma once

#include "common.cuh"

namespace minisgl {

inline uint32_t shared_address(const void* pointer) {
  return static_cast<const char*>(pointer) - static_cast<char*>(emulator::dynamic_shared());
}

inline char* shared_pointer(uint32_t at) {
  return static_cast<char*>(emulator::dynamic_shared()) + at;
}

inline void copy_async(uint32_t to, const void* from) {  // done at once: a missing wait does not show
  memcpy(shared_pointer(to), from, 16);
}

inline void end_group() {}

template <int COUNT>
void wait_groups() {}

inline uint16_t half_of(uint32_t pair, int i) { return static_cast<uint16_t>(pair >> 16 * i); }

inline void load_matrices(uint32_t (&a)[4], uint32_t from) {
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const uint32_t row = emulator::exchange(from, 8 * i + lane / 4);
    memcpy(&a[i], shared_pointer(row + lane % 4 * 4), 4);
  }
}

inline uint32_t transpose(uint32_t x) {
  const int lane = threadIdx.x % 32, row = lane % 4 * 2, column = lane / 4;
  uint32_t y = 0;
  for (int i = 0; i < 2; ++i) {  // element [row + i][column] becomes [column][row + i]
    const uint32_t pair = emulator::exchange(x, (row + i) * 4 + column / 2);
    y |= uint32_t{half_of(pair, column % 2)} << 16 * i;
  }
  return y;
}

inline void load_transposed(uint32_t (&a)[4], uint32_t from) {
  load_matrices(a, from);
  for (uint32_t& x : a) x = transpose(x);
}

template <class E>
float element_of(uint32_t pair, int i) {
  const uint16_t bits = half_of(pair, i);
  E e;
  memcpy(&e, &bits, 2);
  return to_float(e);
}

// Sums in float64: the order and rounding of a tensor core's sums are its own.
template <class E>
void product(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  double sum[4] = {};
  for (int k = 0; k < 16; ++k) {
    const int owner = k % 8 / 2;
    float of_a[2], of_b[2];
    for (int half = 0; half < 2; ++half) {
      const uint32_t pair = emulator::exchange(a[k / 8 * 2 + half], group * 4 + owner);
      of_a[half] = element_of<E>(pair, k % 2);
    }
    for (int column = 0; column < 2; ++column) {
      const int from = (quad * 2 + column) * 4 + owner;
      of_b[column] = element_of<E>(emulator::exchange(k < 8 ? b0 : b1, from), k % 2);
    }
    for (int i = 0; i < 4; ++i) sum[i] += double{of_a[i / 2]} * of_b[i % 2];
  }
  for (int i = 0; i < 4; ++i) d[i] = static_cast<float>(d[i] + sum[i]);
}

inline float exp2_fast(float x) { return std::exp2(x); }

}  // namespace minisgl
