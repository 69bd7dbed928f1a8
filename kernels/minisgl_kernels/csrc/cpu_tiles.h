// The tile registers of AMX: eight of 16 rows of 64 bytes, all of them used whole.
//
// `Tiles` are those of the CPU; `EmulatedTiles` have the same functions in plain C++, so that what
// is built on them can be tested everywhere. Tiles are named by template parameters: an instruction
// holds the number of its registers. A thread configures its tiles before it uses them, or it dies
// of SIGILL, and releases them afterwards, so that they are not saved whenever it is interrupted.
#pragma once

#include "cpu_isa.h"

namespace minisgl::cpu {

constexpr int kTiles = 8, kTileRows = 16, kTileBytes = 64;

#if MINISGL_X86

struct Tiles {
  // Written for the assembler rather than with intrinsics, whose numbers may be no parameters.
  static void configure() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    static_assert(sizeof config == 64, "as the instruction reads it");
    for (int i = 0; i < kTiles; ++i) {
      config.bytes[i] = kTileBytes;
      config.rows[i] = kTileRows;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
  }
  static void release() { __asm__ volatile("tilerelease" ::: "memory"); }

  template <int T>
  MINISGL_INLINE void zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  // 16 rows, `stride` bytes apart.
  template <int T>
  MINISGL_INLINE void load(const void* from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  MINISGL_INLINE void store(void* to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
  }
  // C [16][16] += A [16][32] B [16][16][2]: float32 sums of bf16; subnormals count as zero.
  template <int C, int A, int B>
  MINISGL_INLINE void multiply_bf16() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
  // C [16][16] += A [16][64] B [16][16][4]: int32 sums of A signed, B unsigned.
  template <int C, int A, int B>
  MINISGL_INLINE void multiply_int8() {
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

#endif

struct EmulatedTiles {
  static void configure() {}
  static void release() {}

  template <int T>
  void zero() {
    memset(bytes_[T], 0, sizeof bytes_[T]);
  }
  template <int T>
  void load(const void* from, int64_t stride) {
    for (int i = 0; i < kTileRows; ++i) {
      memcpy(bytes_[T] + i * kTileBytes, static_cast<const char*>(from) + i * stride, kTileBytes);
    }
  }
  template <int T>
  void store(void* to, int64_t stride) {
    for (int i = 0; i < kTileRows; ++i) {
      memcpy(static_cast<char*>(to) + i * stride, bytes_[T] + i * kTileBytes, kTileBytes);
    }
  }
  template <int C, int A, int B>
  void multiply_bf16() {
    for (int m = 0; m < kTileRows; ++m) {
      for (int n = 0; n < 16; ++n) {
        float even = 0, odd = 0;  // in this order, as the instruction
        for (int k = 0; k < 16; ++k) {
          even += flushed(A, m * 32 + 2 * k) * flushed(B, k * 32 + 2 * n);
          odd += flushed(A, m * 32 + 2 * k + 1) * flushed(B, k * 32 + 2 * n + 1);
        }
        at<float>(C, m * 16 + n) += even + odd;
      }
    }
  }
  template <int C, int A, int B>
  void multiply_int8() {
    for (int m = 0; m < kTileRows; ++m) {
      for (int n = 0; n < 16; ++n) {
        int32_t sum = 0;
        for (int k = 0; k < 16; ++k) {
          for (int p = 0; p < 4; ++p) {
            sum += at<int8_t>(A, m * 64 + 4 * k + p) * at<uint8_t>(B, k * 64 + 4 * n + p);
          }
        }
        at<int32_t>(C, m * 16 + n) += sum;
      }
    }
  }

 private:
  template <class Element>
  Element& at(int tile, int index) {
    return reinterpret_cast<Element*>(bytes_[tile])[index];
  }
  float flushed(int tile, int index) {
    const bf16 value = at<bf16>(tile, index);
    return (value & 0x7f80) == 0 ? 0.0f : to_float(value);
  }

  alignas(64) unsigned char bytes_[kTiles][kTileRows * kTileBytes];
};

}  // namespace minisgl::cpu
