// Which vector instructions the CPU kernels use: found out when they run, not when they compile.
//
// A function for one instruction set carries its MINISGL_* attribute, and so do the helpers that it
// inlines; lambdas in it would not. Nothing else in a library may need more than the baseline.
#pragma once

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 11)
#define MINISGL_X86 1
#include <cpuid.h>
#include <immintrin.h>
#define MINISGL_AVX2 __attribute__((target("avx2,fma")))
#define MINISGL_AVX512 \
  __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni")))
#define MINISGL_AMX                                                                           \
  __attribute__((target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni," \
                        "amx-tile,amx-bf16,amx-int8")))
#else
#define MINISGL_X86 0
#endif

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define MINISGL_INLINE inline __attribute__((always_inline))
// Before a loop over registers, so that arrays of them are never in memory.
#if defined(__clang__)
#define MINISGL_UNROLL _Pragma("unroll")
#else
#define MINISGL_UNROLL _Pragma("GCC unroll 16")
#endif

namespace minisgl::cpu {

// In ascending order: a CPU that has one has those before it.
enum class Isa : int32_t {
  portable = 0,  // plain C++
  avx2 = 1,      // with FMA
  avx512 = 2,    // with BF16 and VNNI
  amx = 3,       // tiles of bf16 and int8, beside all of avx512
};

#if MINISGL_X86
// Whether Linux lets this process use tiles. The permission is the process's: threads inherit it.
inline bool tiles_permitted() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

// The best that CPU, operating system and permissions allow.
inline Isa best_isa() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return Isa::portable;
  const bool fma = c >> 12 & 1, saved = c >> 27 & 1;  // saved: the system keeps wide registers
  if (!fma || !saved) return Isa::portable;
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return Isa::portable;
  const unsigned features = b, more = c, tiles = d;
  if (!(features >> 5 & 1) || (low & 0x6) != 0x6) return Isa::portable;
  unsigned a1 = 0, b1, c1, d1;
  if (a >= 1) __get_cpuid_count(7, 1, &a1, &b1, &c1, &d1);
  const bool wide = (features >> 16 & 1) && (features >> 17 & 1) &&  // F, DQ
                    (features >> 30 & 1) && (features >> 31 & 1);    // BW, VL
  if (!wide || !(more >> 11 & 1) || !(a1 >> 5 & 1) || (low & 0xe6) != 0xe6) return Isa::avx2;
  const bool amx = (tiles >> 22 & 1) && (tiles >> 24 & 1) && (tiles >> 25 & 1);
  return amx && (low & 0x60000) == 0x60000 && tiles_permitted() ? Isa::amx : Isa::avx512;
}
#else
inline Isa best_isa() { return Isa::portable; }
#endif

using bf16 = uint16_t;

MINISGL_INLINE float to_float(bf16 value) {
  const uint32_t bits = uint32_t{value} << 16;
  float result;
  memcpy(&result, &bits, sizeof result);
  return result;
}

// To nearest, ties to even; a NaN stays one.
MINISGL_INLINE bf16 to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<bf16>(bits >> 16 | 0x40);
  return static_cast<bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace minisgl::cpu
