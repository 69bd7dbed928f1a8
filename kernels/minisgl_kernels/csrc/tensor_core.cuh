// Asynchronous copies to shared memory, matrices of 8 by 8, and products of tensor cores, as sm_80
// has them. A lane holds of such a matrix row lane / 4, columns lane % 4 * 2 and + 1; addresses of
// shared memory are 32 bits.
#pragma once

#include "common.cuh"

namespace minisgl {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes, past the L1 cache, and no more into the L2 cache: that would cost rates near the memory's.
__device__ inline void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

// This thread's copies since the last group are a group.
__device__ inline void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All groups of this thread but the last COUNT have arrived.
template <int COUNT>
__device__ inline void wait_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory");
}

// Four matrices; lane i says where row i % 8 of matrix i / 8 stands.
__device__ inline void load_matrices(uint32_t (&a)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(from) : "memory");
}

// The same, each transposed.
__device__ inline void load_transposed(uint32_t (&a)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(from) : "memory");
}

__device__ inline uint32_t transpose(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

template <class E>
constexpr bool is_bfloat = false;
template <>
constexpr bool is_bfloat<__nv_bfloat16> = true;

// d [16, 8] += a [16, 16] b [16, 8]
template <class E>
__device__ inline void product(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#define PRODUCT(type)                                                                           \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0,%1,%2,%3}, "              \
      "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                                  \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                          \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  if constexpr (is_bfloat<E>) PRODUCT("bf16"); else PRODUCT("f16");
#undef PRODUCT
}

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace minisgl
