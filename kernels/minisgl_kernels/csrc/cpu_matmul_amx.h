// Products with AMX: a block of packed weights is a row of tiles. Sums of up to 32 rows and 2 blocks
// are in four tiles, so that each weight and each part of x is loaded for two multiplications; of up
// to 16 rows and 4 blocks in four as well. What is no whole tile of x goes through a tile in memory.
#pragma once

#include "cpu_matmul_avx512.h"
#include "cpu_tiles.h"

namespace minisgl::cpu::amx {

constexpr int kBlocks = 4;

// Has the 16 lines of a tile fetched.
MINISGL_INLINE void fetch(const char* lines) {
  for (int i = 0; i < kTileRows; ++i) __builtin_prefetch(lines + i * kTileBytes);
}

// Rows `from` to `from` + 16 of x and bytes `at` to `at` + 64 of them, in tile A of `tiles`. Beyond
// `rows` and `row_bytes` there is nothing to be read, and zero is loaded.
template <int A, class Tiles>
MINISGL_INLINE void load_x(Tiles& tiles, const char* x, int64_t stride, int from, int rows,
                           int64_t at, int64_t row_bytes) {
  const char* const begin = x + from * stride + at;
  if (rows - from >= kTileRows && row_bytes - at >= kTileBytes) {
    tiles.template load<A>(begin, stride);
    return;
  }
  alignas(64) char part[kTileRows * kTileBytes] = {};
  const int64_t width = row_bytes - at < kTileBytes ? row_bytes - at : kTileBytes;
  for (int i = 0; i < rows - from && i < kTileRows; ++i) {
    if (width == kTileBytes) {
      memcpy(part + i * kTileBytes, begin + i * stride, kTileBytes);
    } else {
      memcpy(part + i * kTileBytes, begin + i * stride, width);
    }
  }
  tiles.template load<A>(part, kTileBytes);
}

template <bool Int8, int C, int A, int B, class Tiles>
MINISGL_INLINE void multiply(Tiles& tiles) {
  if constexpr (Int8) {
    tiles.template multiply_int8<C, A, B>();
  } else {
    tiles.template multiply_bf16<C, A, B>();
  }
}

// 17 to 32 rows and one or two blocks. Tiles 0 to 3 hold sums, 4 and 5 x, 6 and 7 weights.
template <bool Int8, bool Two, class Tiles>
inline void many_rows(Tiles& tiles, const char* x, int64_t stride, int rows, int64_t row_bytes,
                      const char* w, int64_t block, int64_t ahead, float* tile, int64_t width) {
  tiles.template zero<0>();
  tiles.template zero<1>();
  tiles.template zero<2>();
  tiles.template zero<3>();
  for (int64_t at = 0; at < row_bytes; at += kTileBytes) {
    const char* const line = w + at * kTileRows;
    fetch(line + ahead);
    tiles.template load<6>(line, kTileBytes);
    load_x<4>(tiles, x, stride, 0, rows, at, row_bytes);
    multiply<Int8, 0, 4, 6>(tiles);
    load_x<5>(tiles, x, stride, kTileRows, rows, at, row_bytes);
    multiply<Int8, 1, 5, 6>(tiles);
    if constexpr (Two) {
      fetch(line + block + ahead);
      tiles.template load<7>(line + block, kTileBytes);
      multiply<Int8, 2, 4, 7>(tiles);
      multiply<Int8, 3, 5, 7>(tiles);
    }
  }
  const int64_t bytes = width * sizeof(float);
  tiles.template store<0>(tile, bytes);
  tiles.template store<1>(tile + kTileRows * width, bytes);
  if constexpr (Two) {
    tiles.template store<2>(tile + kBlock, bytes);
    tiles.template store<3>(tile + kTileRows * width + kBlock, bytes);
  }
}

// One to 16 rows and Blocks blocks. Tiles 0 to 3 hold sums, 4 x, 5 to 7 weights.
template <bool Int8, int Blocks, class Tiles>
inline void few_rows(Tiles& tiles, const char* x, int64_t stride, int rows, int64_t row_bytes,
                     const char* w, int64_t block, int64_t ahead, float* tile, int64_t width) {
  tiles.template zero<0>();
  tiles.template zero<1>();
  tiles.template zero<2>();
  tiles.template zero<3>();
  for (int64_t at = 0; at < row_bytes; at += kTileBytes) {
    const char* const line = w + at * kTileRows;
    for (int i = 0; i < Blocks; ++i) fetch(line + i * block + ahead);
    load_x<4>(tiles, x, stride, 0, rows, at, row_bytes);
    tiles.template load<5>(line, kTileBytes);
    multiply<Int8, 0, 4, 5>(tiles);
    if constexpr (Blocks > 1) {
      tiles.template load<6>(line + block, kTileBytes);
      multiply<Int8, 1, 4, 6>(tiles);
    }
    if constexpr (Blocks > 2) {
      tiles.template load<7>(line + 2 * block, kTileBytes);
      multiply<Int8, 2, 4, 7>(tiles);
    }
    if constexpr (Blocks > 3) {
      tiles.template load<5>(line + 3 * block, kTileBytes);
      multiply<Int8, 3, 4, 5>(tiles);
    }
  }
  const int64_t bytes = width * sizeof(float);
  tiles.template store<0>(tile, bytes);
  if constexpr (Blocks > 1) tiles.template store<1>(tile + kBlock, bytes);
  if constexpr (Blocks > 2) tiles.template store<2>(tile + 2 * kBlock, bytes);
  if constexpr (Blocks > 3) tiles.template store<3>(tile + 3 * kBlock, bytes);
}

template <bool Int8, class Tiles>
inline void sums(const char* x, int64_t stride, int rows, int64_t row_bytes, const char* w,
                 int blocks, int64_t block, int64_t ahead, float* tile) {
  Tiles tiles;
  const int64_t width = blocks * kBlock;
  if (rows > kTileRows) {
    for (; blocks >= 2; blocks -= 2, w += 2 * block, tile += 2 * kBlock) {
      many_rows<Int8, true>(tiles, x, stride, rows, row_bytes, w, block, ahead, tile, width);
    }
    if (blocks == 1) {
      many_rows<Int8, false>(tiles, x, stride, rows, row_bytes, w, block, ahead, tile, width);
    }
  } else if (blocks == 4) {
    few_rows<Int8, 4>(tiles, x, stride, rows, row_bytes, w, block, ahead, tile, width);
  } else if (blocks == 3) {
    few_rows<Int8, 3>(tiles, x, stride, rows, row_bytes, w, block, ahead, tile, width);
  } else if (blocks == 2) {
    few_rows<Int8, 2>(tiles, x, stride, rows, row_bytes, w, block, ahead, tile, width);
  } else {
    few_rows<Int8, 1>(tiles, x, stride, rows, row_bytes, w, block, ahead, tile, width);
  }
}

template <class Tiles>
inline void bf16_tile(const bf16* x, int64_t ldx, int rows, const bf16* w, int64_t inputs,
                      int blocks, int64_t ahead, float* tile) {
  sums<false, Tiles>(reinterpret_cast<const char*>(x), ldx * sizeof(bf16), rows,
                     inputs * sizeof(bf16), reinterpret_cast<const char*>(w), blocks,
                     block_bytes(inputs, Stored::bf16), ahead, tile);
}

using Scale = void(float* tile, int rows, int blocks, const float* row_scale, const float* scale,
                   const int32_t* sums);

// Of sums of x + 128 in `tile`, as int32, the products.
inline void scale_portable(float* tile, int rows, int blocks, const float* row_scale,
                           const float* scale, const int32_t* sums) {
  for (int row = 0; row < rows; ++row, tile += blocks * kBlock) {
    for (int at = 0; at < blocks * kBlock; ++at) {
      int32_t sum;
      memcpy(&sum, tile + at, sizeof sum);
      tile[at] = static_cast<float>(sum - 128 * sums[at]) * (row_scale[row] * scale[at]);
    }
  }
}

#if MINISGL_X86
MINISGL_AVX512 inline void scale_avx512(float* tile, int rows, int blocks, const float* row_scale,
                                        const float* scale, const int32_t* sums) {
  for (int b = 0; b < blocks; ++b, tile += kBlock, scale += kBlock, sums += kBlock) {
    const __m512i middle = _mm512_slli_epi32(_mm512_loadu_si512(sums), 7);
    const __m512 factor = _mm512_loadu_ps(scale);
    for (int row = 0; row < rows; ++row) {
      float* const at = tile + row * blocks * kBlock;
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_load_si512(at), middle));
      _mm512_store_ps(at, _mm512_mul_ps(sum, _mm512_mul_ps(_mm512_set1_ps(row_scale[row]), factor)));
    }
  }
}
#endif

template <class Tiles, Scale scaled>
inline void int8_tile(const uint8_t* x, int rows, const int8_t* w, int64_t k, int blocks,
                      int64_t ahead, const float* row_scale, const float* scale,
                      const int32_t* of_outputs, float* tile) {
  sums<true, Tiles>(reinterpret_cast<const char*>(x), k, rows, k,
                    reinterpret_cast<const char*>(w), blocks, kBlock * k, ahead, tile);
  scaled(tile, rows, blocks, row_scale, scale, of_outputs);
}

inline Shape shape(int64_t m) {
  return {static_cast<int>(m <= kTileRows ? kTileRows : 2 * kTileRows), kBlocks};
}

}  // namespace minisgl::cpu::amx

namespace minisgl::cpu {

#if MINISGL_X86
inline const Kernels& amx_kernels() {
  static constexpr Kernels kernels = {amx::shape,
                                      amx::bf16_tile<Tiles>,
                                      amx::int8_tile<Tiles, amx::scale_avx512>,
                                      avx512::quantise,
                                      avx512::finish,
                                      Tiles::configure,
                                      Tiles::release};
  return kernels;
}
#endif

// The same with emulated tiles, and nothing else that a CPU may lack.
inline const Kernels& emulated_amx_kernels() {
  static constexpr Kernels kernels = {amx::shape,
                                      amx::bf16_tile<EmulatedTiles>,
                                      amx::int8_tile<EmulatedTiles, amx::scale_portable>,
                                      portable::quantise,
                                      portable::finish,
                                      EmulatedTiles::configure,
                                      EmulatedTiles::release};
  return kernels;
}

}  // namespace minisgl::cpu
