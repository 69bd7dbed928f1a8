// Products with AVX2 and FMA, for CPUs without instructions for bf16: 16 outputs of up to four rows
// at a time. bf16 weights become float32 by a shift; int8 ones int16, whose products are exact.
#pragma once

#include "cpu_matmul_portable.h"

#if MINISGL_X86

namespace minisgl::cpu::avx2 {

constexpr int kRows = 4, kInt8Rows = 2, kBlocks = 4;

MINISGL_AVX2 MINISGL_INLINE __m256 spread(bf16 value) {
  return _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int32_t>(uint32_t{value} << 16)));
}

// Of [8][2] bf16, those of even and of odd inputs.
MINISGL_AVX2 MINISGL_INLINE __m256 even(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}

MINISGL_AVX2 MINISGL_INLINE __m256 odd(__m256i pairs) {
  return _mm256_castsi256_ps(
      _mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int32_t>(0xffff0000))));
}

MINISGL_AVX2 MINISGL_INLINE __m256i line(const void* from) {
  return _mm256_load_si256(static_cast<const __m256i*>(from));
}

template <int R>
MINISGL_AVX2 void bf16_sums(const bf16* x, int64_t ldx, const char* w, int64_t inputs,
                            int64_t ahead, float* tile, int64_t width) {
  __m256 sum[R][2];
  MINISGL_UNROLL
  for (int r = 0; r < R; ++r) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
  for (int64_t i = 0; i + 1 < inputs; i += 2, w += 64) {
    _mm_prefetch(w + ahead, _MM_HINT_T0);
    const __m256i low = line(w), high = line(w + 32);
    MINISGL_UNROLL
    for (int r = 0; r < R; ++r) {
      const __m256 first = spread(x[r * ldx + i]), second = spread(x[r * ldx + i + 1]);
      sum[r][0] = _mm256_fmadd_ps(first, even(low), sum[r][0]);
      sum[r][1] = _mm256_fmadd_ps(first, even(high), sum[r][1]);
      sum[r][0] = _mm256_fmadd_ps(second, odd(low), sum[r][0]);
      sum[r][1] = _mm256_fmadd_ps(second, odd(high), sum[r][1]);
    }
  }
  if (inputs % 2 != 0) {
    MINISGL_UNROLL
    for (int r = 0; r < R; ++r) {
      const __m256 last = spread(x[r * ldx + inputs - 1]);
      sum[r][0] = _mm256_fmadd_ps(last, even(line(w)), sum[r][0]);
      sum[r][1] = _mm256_fmadd_ps(last, even(line(w + 32)), sum[r][1]);
    }
  }
  MINISGL_UNROLL
  for (int r = 0; r < R; ++r) {
    _mm256_store_ps(tile + r * width, sum[r][0]);
    _mm256_store_ps(tile + r * width + 8, sum[r][1]);
  }
}

template <int R>
MINISGL_AVX2 void int8_sums(const Quantised& x, const char* w, int64_t ahead, const float* scale,
                            float* tile, int64_t width) {
  __m256 total[R][4];  // of four outputs each, in two parts
  MINISGL_UNROLL
  for (int r = 0; r < R; ++r) {
    MINISGL_UNROLL
    for (int c = 0; c < 4; ++c) total[r][c] = _mm256_setzero_ps();
  }
  const __m256i middle = _mm256_set1_epi16(128);
  const int64_t groups = x.groups();
  for (int64_t group = 0; group < groups; ++group) {
    __m256i sum[R][4];
    MINISGL_UNROLL
    for (int r = 0; r < R; ++r) {
      MINISGL_UNROLL
      for (int c = 0; c < 4; ++c) sum[r][c] = _mm256_setzero_si256();
    }
    for (int64_t i = group * kGroup; i < (group + 1) * kGroup; i += 4, w += 64) {
      _mm_prefetch(w + ahead, _MM_HINT_T0);
      __m256i four[R];
      MINISGL_UNROLL
      for (int r = 0; r < R; ++r) {
        int32_t bytes;
        memcpy(&bytes, x.q + r * x.k + i, sizeof bytes);
        four[r] = _mm256_cvtepi8_epi16(_mm_set1_epi32(bytes));
      }
      MINISGL_UNROLL
      for (int c = 0; c < 4; ++c) {
        const __m256i weights = _mm256_sub_epi16(
            _mm256_cvtepu8_epi16(_mm_load_si128(reinterpret_cast<const __m128i*>(w) + c)), middle);
        MINISGL_UNROLL
        for (int r = 0; r < R; ++r) {
          sum[r][c] = _mm256_add_epi32(sum[r][c], _mm256_madd_epi16(four[r], weights));
        }
      }
    }
    MINISGL_UNROLL
    for (int r = 0; r < R; ++r) {
      const __m256 by = _mm256_set1_ps(x.group[group * x.rows + r].scale);
      MINISGL_UNROLL
      for (int c = 0; c < 4; ++c) {
        total[r][c] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r][c]), by, total[r][c]);
      }
    }
  }
  MINISGL_UNROLL
  for (int r = 0; r < R; ++r) {
    MINISGL_UNROLL
    for (int half = 0; half < 2; ++half) {
      // hadd gives outputs 0 1 4 5 2 3 6 7 of these eight.
      const __m256d both = _mm256_permute4x64_pd(
          _mm256_castps_pd(_mm256_hadd_ps(total[r][2 * half], total[r][2 * half + 1])), 0xd8);
      _mm256_store_ps(tile + r * width + 8 * half,
                      _mm256_mul_ps(_mm256_castpd_ps(both), _mm256_loadu_ps(scale + 8 * half)));
    }
  }
}

// One block after the other is computed, and each fetches what is to be fetched with it.
inline int64_t ahead_of(Reading reading) { return reading.apart == 0 ? 0 : reading.ahead; }

inline void bf16_tile(const bf16* x, int64_t ldx, int rows, const bf16* w, int64_t inputs,
                      int blocks, Reading reading, float* tile) {
  const int64_t ahead = ahead_of(reading);
  static constexpr decltype(&bf16_sums<1>) table[] = {bf16_sums<1>, bf16_sums<2>, bf16_sums<3>,
                                                      bf16_sums<4>};
  const char* from = reinterpret_cast<const char*>(w);
  for (int b = 0; b < blocks; ++b, from += block_bytes(inputs, Stored::bf16)) {
    table[rows - 1](x, ldx, from, inputs, ahead, tile + b * kBlock, blocks * kBlock);
  }
}

inline void int8_tile(const Quantised& x, int rows, const uint8_t* w, int blocks, Reading reading,
                      const float* scale, float* tile) {
  const int64_t ahead = ahead_of(reading);
  for (int b = 0; b < blocks; ++b, w += kBlock * x.k, scale += kBlock) {
    const char* const from = reinterpret_cast<const char*>(w);
    for (int row = 0; row < rows; row += kInt8Rows) {
      float* const to = tile + (row * blocks + b) * kBlock;
      if (rows - row == 1) {
        int8_sums<1>(x.from_row(row), from, ahead, scale, to, blocks * kBlock);
      } else {
        int8_sums<2>(x.from_row(row), from, ahead, scale, to, blocks * kBlock);
      }
    }
  }
}

inline Shape shape(int64_t m, Stored) {
  return {static_cast<int>(m < kRows ? m : kRows), kBlocks};
}

}  // namespace minisgl::cpu::avx2

namespace minisgl::cpu {

inline const Kernels& avx2_kernels() {
  static constexpr Kernels kernels = {avx2::shape,        avx2::bf16_tile,  avx2::int8_tile,
                                      portable::quantise, portable::finish, nullptr,
                                      nullptr};
  return kernels;
}

}  // namespace minisgl::cpu

#endif
