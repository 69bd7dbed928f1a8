// Products with AVX-512: vdpbf16ps for bf16 (sums float32; subnormals count as zero), vpdpbusd for
// int8. A tile of R rows and C blocks stays in registers; each weight is loaded once for its rows,
// each pair (four) of x once for its blocks.
#pragma once

#include <type_traits>

#include "cpu_matmul_portable.h"

#if MINISGL_X86

namespace minisgl::cpu::avx512 {

constexpr int kBlocks = 2;
// With two blocks, 24 of 32 registers hold sums: of int8 a half as integers. A product of few rows
// is a single tile, and memory its limit.
constexpr int kRows = 12, kInt8Rows = 6, kFewRows = 8;

MINISGL_AVX512 MINISGL_INLINE __m512i spread(const void* four_bytes) {
  int32_t value;
  memcpy(&value, four_bytes, sizeof value);
  return _mm512_set1_epi32(value);
}

// R rows, up to 12, `stride` bytes apart, by a pointer for three of them: there are too few
// registers for a pointer each, and the compiler would keep them in vector registers.
template <int R>
struct Rows {
  const char *a, *b, *c, *d;
  int64_t stride;

  MINISGL_INLINE Rows(const void* first, int64_t apart)
      : a(static_cast<const char*>(first)), b(a + 3 * apart), c(a + 6 * apart), d(a + 9 * apart),
        stride(apart) {}
  MINISGL_INLINE const char* operator[](int row) const {
    return (row < 3 ? a : row < 6 ? b : row < 9 ? c : d) + row % 3 * stride;
  }
  MINISGL_INLINE void advance() {
    a += 4, b += 4, c += 4, d += 4;
    __asm__("" : "+r"(a));
    if constexpr (R > 3) __asm__("" : "+r"(b));
    if constexpr (R > 6) __asm__("" : "+r"(c));
    if constexpr (R > 9) __asm__("" : "+r"(d));
  }
};

// The blocks lie `block` bytes apart.
template <int R, int C>
MINISGL_AVX512 void bf16_sums(const bf16* x, int64_t ldx, const char* w, int64_t block,
                              int64_t inputs, Reading reading, float* tile, int64_t width) {
  __m512 sum[R][C];
  MINISGL_UNROLL
  for (int r = 0; r < R; ++r) {
    MINISGL_UNROLL
    for (int c = 0; c < C; ++c) sum[r][c] = _mm512_setzero_ps();
  }
  Rows<R> rows(x, ldx * sizeof(bf16));
  for (const char* const end = w + inputs / 2 * 64; w != end; w += 64, rows.advance()) {
    __m512bh line[C];
    MINISGL_UNROLL
    for (int c = 0; c < C; ++c) {
      line[c] = (__m512bh)_mm512_load_si512(w + c * block);
      _mm_prefetch(w + reading.ahead + c * reading.apart, _MM_HINT_T0);
    }
    MINISGL_UNROLL
    for (int r = 0; r < R; ++r) {
      const __m512bh pair = (__m512bh)spread(rows[r]);
      MINISGL_UNROLL
      for (int c = 0; c < C; ++c) sum[r][c] = _mm512_dpbf16_ps(sum[r][c], pair, line[c]);
    }
  }
  if (inputs % 2 != 0) {  // the weights beyond are zero, but what is beyond x may be no number
    MINISGL_UNROLL
    for (int r = 0; r < R; ++r) {
      const __m512bh pair = (__m512bh)_mm512_set1_epi32(x[r * ldx + inputs - 1]);
      MINISGL_UNROLL
      for (int c = 0; c < C; ++c) {
        const __m512bh line = (__m512bh)_mm512_load_si512(w + c * block);
        sum[r][c] = _mm512_dpbf16_ps(sum[r][c], pair, line);
      }
    }
  }
  MINISGL_UNROLL
  for (int r = 0; r < R; ++r) {
    MINISGL_UNROLL
    for (int c = 0; c < C; ++c) _mm512_store_ps(tile + r * width + c * kBlock, sum[r][c]);
  }
}

// For each group of inputs the products are summed as int32, then added to the sums in float32.
template <int R, int C>
MINISGL_AVX512 void int8_sums(const Quantised& x, const char* w, int64_t block, Reading reading,
                              const float* scale, float* tile, int64_t width) {
  __m512 total[R][C];
  MINISGL_UNROLL
  for (int r = 0; r < R; ++r) {
    MINISGL_UNROLL
    for (int c = 0; c < C; ++c) total[r][c] = _mm512_setzero_ps();
  }
  Rows<R> rows(x.q, x.k);
  const Group* group = x.group;
  for (const char* const all = w + x.k * kBlock; w != all; group += x.rows) {
    __m512i sum[R][C];
    MINISGL_UNROLL
    for (int r = 0; r < R; ++r) {
      sum[r][0] = _mm512_set1_epi32(group[r].start);
      MINISGL_UNROLL
      for (int c = 1; c < C; ++c) sum[r][c] = sum[r][0];
    }
    for (const char* const end = w + kGroup * kBlock; w != end; w += 64, rows.advance()) {
      __m512i line[C];
      MINISGL_UNROLL
      for (int c = 0; c < C; ++c) {
        line[c] = _mm512_load_si512(w + c * block);
        _mm_prefetch(w + reading.ahead + c * reading.apart, _MM_HINT_T0);
      }
      MINISGL_UNROLL
      for (int r = 0; r < R; ++r) {
        const __m512i four = spread(rows[r]);
        MINISGL_UNROLL
        for (int c = 0; c < C; ++c) {
          // With the intrinsic GCC copies each sum before and after.
          __asm__("vpdpbusd %2, %1, %0" : "+v"(sum[r][c]) : "v"(line[c]), "v"(four));
        }
      }
    }
    MINISGL_UNROLL
    for (int r = 0; r < R; ++r) {
      const __m512 by = _mm512_set1_ps(group[r].scale);
      MINISGL_UNROLL
      for (int c = 0; c < C; ++c) {
        total[r][c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r][c]), by, total[r][c]);
      }
    }
  }
  MINISGL_UNROLL
  for (int r = 0; r < R; ++r) {
    MINISGL_UNROLL
    for (int c = 0; c < C; ++c) {
      const __m512 value = _mm512_mul_ps(total[r][c], _mm512_loadu_ps(scale + c * kBlock));
      _mm512_store_ps(tile + r * width + c * kBlock, value);
    }
  }
}

// The functions for 1 to `one` rows of one block, and for 1 to `two` of two.
template <class Sums, int one, int two>
struct Table {
  Sums of[one > two ? one : two][kBlocks] = {};

  template <int R = 1>
  constexpr Table filled() {
    if constexpr (R <= one) fill<R, 1>();
    if constexpr (R <= two) fill<R, 2>();
    if constexpr (R < one || R < two) filled<R + 1>();
    return *this;
  }

 private:
  template <int R, int C>
  constexpr void fill() {
    if constexpr (std::is_same_v<Sums, decltype(&bf16_sums<1, 1>)>) {
      of[R - 1][C - 1] = bf16_sums<R, C>;
    } else {
      of[R - 1][C - 1] = int8_sums<R, C>;
    }
  }
};

// Calls `sums(first block, blocks, how they are read)` for what is read side by side.
template <class Call>
MINISGL_INLINE void in_parts(int blocks, int64_t block, Reading reading, Call sums) {
  if (!reading.singly) return sums(0, blocks, reading);
  for (int b = 0; b < blocks; ++b) {
    const bool last = b + 1 == blocks;
    const int64_t ahead = reading.ahead == 0 ? 0 : last ? reading.ahead - b * block : block;
    sums(b, 1, Reading{true, ahead, 0});
  }
}

inline void bf16_tile(const bf16* x, int64_t ldx, int rows, const bf16* w, int64_t inputs,
                      int blocks, Reading reading, float* tile) {
  static constexpr auto table = Table<decltype(&bf16_sums<1, 1>), kRows, kRows>().filled();
  const int64_t block = block_bytes(inputs, Stored::bf16);
  const char* const from = reinterpret_cast<const char*>(w);
  in_parts(blocks, block, reading, [&](int first, int count, Reading part) {
    table.of[rows - 1][count - 1](x, ldx, from + first * block, block, inputs, part,
                                  tile + first * kBlock, blocks * kBlock);
  });
}

inline void int8_tile(const Quantised& x, int rows, const uint8_t* w, int blocks, Reading reading,
                      const float* scale, float* tile) {
  static constexpr auto table = Table<decltype(&int8_sums<1, 1>), kFewRows, kInt8Rows>().filled();
  const int64_t block = kBlock * x.k;
  const char* const from = reinterpret_cast<const char*>(w);
  in_parts(blocks, block, reading, [&](int first, int count, Reading part) {
    table.of[rows - 1][count - 1](x, from + first * block, block, part, scale + first * kBlock,
                                  tile + first * kBlock, blocks * kBlock);
  });
}

MINISGL_AVX512 MINISGL_INLINE __m512 widened(__m256i values) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(values), 16));
}

// `count` values from 0 to 16.
MINISGL_AVX512 MINISGL_INLINE __mmask16 first(int64_t count) {
  return static_cast<__mmask16>((1u << count) - 1);
}

MINISGL_AVX512 inline void quantise(const bf16* x, int64_t inputs, const Quantised& out) {
  const __m512i magnitude = _mm512_set1_epi16(0x7fff);
  for (int64_t group = 0; group < out.groups(); ++group) {
    const int64_t from = group * kGroup, left = inputs - from;
    const uint64_t mask = left >= kGroup ? ~uint64_t{0} : (uint64_t{1} << left) - 1;
    const __m512i halves[2] = {
        _mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask), x + from),
        _mm512_maskz_loadu_epi16(static_cast<__mmask32>(mask >> 32), x + from + 32)};
    const __m512i both = _mm512_max_epu16(_mm512_and_si512(halves[0], magnitude),
                                          _mm512_and_si512(halves[1], magnitude));
    const __m256i four = _mm256_max_epu16(_mm512_castsi512_si256(both),
                                          _mm512_extracti64x4_epi64(both, 1));
    const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(four),
                                        _mm256_extracti128_si256(four, 1));
    // The smallest of what is missing to 65535 has an instruction of its own.
    const __m128i ones = _mm_set1_epi16(-1);
    const int missing = _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(eight, ones)), 0);
    const float scale = scale_of(static_cast<bf16>(0xffff - missing));
    const __m512 inverse = _mm512_set1_ps(scale > 0.0f ? 1.0f / scale : 0.0f);
    __m512i sum = _mm512_setzero_si512();
    MINISGL_UNROLL
    for (int i = 0; i < 4; ++i) {
      const __m512 values = widened(i % 2 == 0 ? _mm512_castsi512_si256(halves[i / 2])
                                               : _mm512_extracti64x4_epi64(halves[i / 2], 1));
      __m512i q = _mm512_cvtps_epi32(_mm512_mul_ps(values, inverse));
      if (!(scale > 0.0f)) q = _mm512_setzero_si512();  // also for infinity times 0
      sum = _mm512_add_epi32(sum, q);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out.q + from) + i, _mm512_cvtepi32_epi8(q));
    }
    out.group[group * out.rows] = {scale, -128 * _mm512_reduce_add_epi32(sum)};
  }
}

// e^x to 2e-7: 2^n times a polynomial of Cephes in the rest.
MINISGL_AVX512 MINISGL_INLINE __m512 exponential(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)),
                                        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  const __m512 one = _mm512_set1_ps(1.0f);
  return _mm512_scalef_ps(_mm512_fmadd_ps(_mm512_mul_ps(r, r), p, _mm512_add_ps(r, one)), n);
}

MINISGL_AVX512 MINISGL_INLINE __m512 silu(__m512 x) {
  // Within these limits the exponential is 0 and infinite, and no infinity is subtracted from one.
  __m512 y = _mm512_sub_ps(_mm512_setzero_ps(), x);
  y = _mm512_max_ps(_mm512_set1_ps(-104.0f), _mm512_min_ps(_mm512_set1_ps(104.0f), y));  // or NaN
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), exponential(y)));
}

MINISGL_AVX512 MINISGL_INLINE void store(bf16* out, __mmask16 mask, __m512 values) {
  _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh(values));
}

MINISGL_AVX512 inline void finish(const float* tile, int rows, const Packed& w, int64_t block,
                                  int blocks, const Epilogue& to, int64_t row) {
  const int step = to.then == Then::silu ? 2 : 1;
  for (int b = 0; b < blocks; b += step) {
    const int64_t from = (block + b) / step * kBlock, left = w.outputs / step - from;
    const __mmask16 mask = first(left < kBlock ? left : kBlock);
    __m512 bias[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int i = 0; w.bias != nullptr && i < step; ++i) {
      bias[i] = _mm512_loadu_ps(w.bias + (block + b + i) * kBlock);
    }
    const float* sum = tile + b * kBlock;
    for (int64_t at = row * to.ldo + from; rows > 0 && at < (row + rows) * to.ldo + from;
         at += to.ldo, sum += blocks * kBlock) {
      bf16* const out = static_cast<bf16*>(to.out) + at;
      const __m512 value = _mm512_add_ps(_mm512_load_ps(sum), bias[0]);
      if (to.then == Then::store) {
        store(out, mask, value);
      } else if (to.then == Then::add) {
        const __m512 old = widened(_mm256_maskz_loadu_epi16(mask, out));
        store(out, mask, _mm512_add_ps(old, value));
      } else if (to.then == Then::logits) {
        _mm512_mask_storeu_ps(static_cast<float*>(to.out) + at, mask, value);
      } else {
        const __m512 up = _mm512_add_ps(_mm512_load_ps(sum + kBlock), bias[1]);
        store(out, mask, _mm512_mul_ps(silu(value), up));
      }
    }
  }
}

// Tiles of about the same size, so that none is so small that its sums wait for each other.
inline Shape shape(int64_t m, Stored stored) {
  if (m <= kFewRows) return {static_cast<int>(m), kBlocks, true};
  const int most = stored == Stored::bf16 ? kRows : kInt8Rows;
  const int64_t parts = (m + most - 1) / most;
  return {static_cast<int>((m + parts - 1) / parts), kBlocks};
}

}  // namespace minisgl::cpu::avx512

namespace minisgl::cpu {

inline const Kernels& avx512_kernels() {
  static constexpr Kernels kernels = {avx512::shape,    avx512::bf16_tile, avx512::int8_tile,
                                      avx512::quantise, avx512::finish,    nullptr,
                                      nullptr};
  return kernels;
}

}  // namespace minisgl::cpu

#endif
