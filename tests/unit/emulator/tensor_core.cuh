// The operations of csrc/tensor_core.cuh by exchanges between the lanes of a warp. An address of
// shared memory is an offset into the block's dynamic shared memory; copies arrive at once.
#pragma once

#include <cmath>

#include "common.cuh"

struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }

template <class V>
V __ldcg(const V* at) { return *at; }
template <class V>
void __stcg(V* at, V value) { *at = value; }
inline void __threadfence() {}
inline void __syncwarp() { emulator::exchange(0, 0); }
inline int atomicAdd(int* at, int value) {
  const int before = *at;
  *at += value;
  return before;
}
template <class V>
V __shfl_up_sync(unsigned, V value, int step) {
  const int lane = emulator::block().current % 32;
  return emulator::exchange(value, lane < step ? lane : lane - step);
}
using std::fmaxf;
#ifndef INFINITY
#define INFINITY HUGE_VALF
#endif

namespace minisgl {

inline char* shared_memory() { return static_cast<char*>(emulator::dynamic_shared()); }
inline int this_lane() { return emulator::block().current % 32; }

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const char*>(pointer) - shared_memory());
}

template <int ROW_BYTES>
void copy_async(uint32_t to, const void* from) { memcpy(shared_memory() + to, from, 16); }
inline void end_group() {}
template <int COUNT>
void wait_groups() {}

// Two neighbours of 16 bits.
inline uint32_t pair(uint32_t low, uint32_t high) { return (low & 0xffff) | high << 16; }
inline uint16_t half_at(const char* from) {
  uint16_t x;
  memcpy(&x, from, 2);
  return x;
}

inline void load_matrices(uint32_t (&a)[4], uint32_t from) {
  const int row = this_lane() / 4, column = this_lane() % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    const char* at = shared_memory() + emulator::exchange(from, 8 * i + row) + 2 * column;
    a[i] = pair(half_at(at), half_at(at + 2));
  }
}

inline void load_transposed(uint32_t (&a)[4], uint32_t from) {
  const int row = this_lane() / 4, column = this_lane() % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    const char* low = shared_memory() + emulator::exchange(from, 8 * i + column) + 2 * row;
    const char* high = shared_memory() + emulator::exchange(from, 8 * i + column + 1) + 2 * row;
    a[i] = pair(half_at(low), half_at(high));
  }
}

inline uint32_t transpose(uint32_t x) {
  const int row = this_lane() / 4, column = this_lane() % 4 * 2;
  const uint32_t low = emulator::exchange(x, column * 4 + row / 2);
  const uint32_t high = emulator::exchange(x, (column + 1) * 4 + row / 2);
  return pair(low >> row % 2 * 16, high >> row % 2 * 16);
}

template <class E>
float half_of(uint32_t two, int which) {
  const auto bits = static_cast<uint16_t>(two >> which * 16);
  E x;
  memcpy(&x, &bits, 2);
  return to_float(x);
}

template <class E>
void product(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int row = this_lane() / 4, column = this_lane() % 4 * 2;
  float sum[4] = {d[0], d[1], d[2], d[3]};
  for (int k = 0; k < 16; ++k) {
    const int half = k / 8, place = k % 8 / 2, which = k % 2;
    float left[2], right[2];
    for (int i = 0; i < 2; ++i) {
      left[i] = half_of<E>(emulator::exchange(a[i + 2 * half], row * 4 + place), which);
      const uint32_t b = emulator::exchange(half ? b1 : b0, (column + i) * 4 + place);
      right[i] = half_of<E>(b, which);
    }
    for (int j = 0; j < 4; ++j) sum[j] += left[j / 2] * right[j % 2];
  }
  for (int j = 0; j < 4; ++j) d[j] = sum[j];
}

inline float exp2_fast(float x) { return std::exp2(x); }

}  // namespace minisgl
