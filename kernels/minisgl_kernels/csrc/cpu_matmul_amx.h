// Products with AMX: a block of packed weights is a row of tiles. Sums of up to 32 rows and 2 blocks
// are in four tiles, so that each tile of x and of weights is loaded for two multiplications; of up
// to 16 rows and 4 blocks in four as well. What is no whole tile of x goes through one in memory.
#pragma once

#include "cpu_matmul_avx512.h"
#include "cpu_tiles.h"

namespace minisgl::cpu::amx {

constexpr int kBlocks = 4;

// Has fetched what belongs to the 16 lines of a tile of each block.
MINISGL_INLINE void fetch_for(const char* lines, int blocks, Reading reading) {
  const int different = reading.apart == 0 ? 1 : blocks;
  for (int b = 0; b < different; ++b) {
    const char* const from = lines + reading.ahead + b * reading.apart;
    for (int i = 0; i < kTileRows; ++i) __builtin_prefetch(from + i * kTileBytes);
  }
}

// Rows `from` to `from` + 16 of x and bytes `at` to `at` + 64 of them, in tile A. Beyond `rows` and
// `row_bytes` there is nothing to be read, and zero is loaded.
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
    if (width == kTileBytes) {  // a size that the compiler knows
      memcpy(part + i * kTileBytes, begin + i * stride, kTileBytes);
    } else {
      memcpy(part + i * kTileBytes, begin + i * stride, width);
    }
  }
  tiles.template load<A>(part, kTileBytes);
}

// 17 to 32 rows and one or two blocks. Tiles 0 to 3 hold sums, 4 and 5 x, 6 and 7 weights.
template <bool Two, class Tiles>
inline void many_rows(Tiles& tiles, const char* x, int64_t stride, int rows, int64_t row_bytes,
                      const char* w, int64_t block, Reading reading, float* tile, int64_t width) {
  tiles.template zero<0>();
  tiles.template zero<1>();
  tiles.template zero<2>();
  tiles.template zero<3>();
  for (int64_t at = 0; at < row_bytes; at += kTileBytes) {
    const char* const lines = w + at * kTileRows;
    fetch_for(lines, Two ? 2 : 1, reading);
    tiles.template load<6>(lines, kTileBytes);
    load_x<4>(tiles, x, stride, 0, rows, at, row_bytes);
    tiles.template multiply_bf16<0, 4, 6>();
    load_x<5>(tiles, x, stride, kTileRows, rows, at, row_bytes);
    tiles.template multiply_bf16<1, 5, 6>();
    if constexpr (Two) {
      tiles.template load<7>(lines + block, kTileBytes);
      tiles.template multiply_bf16<2, 4, 7>();
      tiles.template multiply_bf16<3, 5, 7>();
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
template <int Blocks, class Tiles>
inline void few_rows(Tiles& tiles, const char* x, int64_t stride, int rows, int64_t row_bytes,
                     const char* w, int64_t block, Reading reading, float* tile, int64_t width) {
  tiles.template zero<0>();
  tiles.template zero<1>();
  tiles.template zero<2>();
  tiles.template zero<3>();
  for (int64_t at = 0; at < row_bytes; at += kTileBytes) {
    const char* const lines = w + at * kTileRows;
    fetch_for(lines, Blocks, reading);
    load_x<4>(tiles, x, stride, 0, rows, at, row_bytes);
    tiles.template load<5>(lines, kTileBytes);
    tiles.template multiply_bf16<0, 4, 5>();
    if constexpr (Blocks > 1) {
      tiles.template load<6>(lines + block, kTileBytes);
      tiles.template multiply_bf16<1, 4, 6>();
    }
    if constexpr (Blocks > 2) {
      tiles.template load<7>(lines + 2 * block, kTileBytes);
      tiles.template multiply_bf16<2, 4, 7>();
    }
    if constexpr (Blocks > 3) {
      tiles.template load<5>(lines + 3 * block, kTileBytes);
      tiles.template multiply_bf16<3, 4, 5>();
    }
  }
  const int64_t bytes = width * sizeof(float);
  tiles.template store<0>(tile, bytes);
  if constexpr (Blocks > 1) tiles.template store<1>(tile + kBlock, bytes);
  if constexpr (Blocks > 2) tiles.template store<2>(tile + 2 * kBlock, bytes);
  if constexpr (Blocks > 3) tiles.template store<3>(tile + 3 * kBlock, bytes);
}

template <class Tiles>
inline void bf16_tile(const bf16* x, int64_t ldx, int rows, const bf16* w, int64_t inputs,
                      int blocks, Reading reading, float* tile) {
  Tiles tiles;
  const char* const from = reinterpret_cast<const char*>(x);
  const char* weights = reinterpret_cast<const char*>(w);
  const int64_t stride = ldx * sizeof(bf16), row_bytes = inputs * sizeof(bf16);
  const int64_t block = block_bytes(inputs, Stored::bf16), width = blocks * kBlock;
  const auto call = [&](auto function) {
    function(tiles, from, stride, rows, row_bytes, weights, block, reading, tile, width);
  };
  if (rows > kTileRows) {
    for (; blocks >= 2; blocks -= 2, weights += 2 * block, tile += 2 * kBlock) {
      call(many_rows<true, Tiles>);
    }
    if (blocks == 1) call(many_rows<false, Tiles>);
  } else if (blocks == 4) {
    call(few_rows<4, Tiles>);
  } else if (blocks == 3) {
    call(few_rows<3, Tiles>);
  } else if (blocks == 2) {
    call(few_rows<2, Tiles>);
  } else {
    call(few_rows<1, Tiles>);
  }
}

// Sums of products of a group as int32 [blocks][16][16].
struct GroupSums {
  alignas(64) int32_t of[kBlocks][kTileRows * kBlock];
};

// Adds the sums of group `group` of rows of x, up to 16, to `tile`.
using Add = void(const GroupSums& sums, const Quantised& x, int64_t group, int rows, int blocks,
                 float* tile);

inline void add_portable(const GroupSums& sums, const Quantised& x, int64_t group, int rows,
                         int blocks, float* tile) {
  for (int row = 0; row < rows; ++row) {
    const Group& own = x.group[group * x.rows + row];
    for (int b = 0; b < blocks; ++b, tile += kBlock) {
      for (int j = 0; j < kBlock; ++j) {
        const int32_t sum = own.start + sums.of[b][row * kBlock + j];
        tile[j] += static_cast<float>(sum) * own.scale;
      }
    }
  }
}

#if MINISGL_X86
MINISGL_AVX512 inline void add_avx512(const GroupSums& sums, const Quantised& x, int64_t group,
                                      int rows, int blocks, float* tile) {
  for (int row = 0; row < rows; ++row) {
    const Group& own = x.group[group * x.rows + row];
    const __m512i start = _mm512_set1_epi32(own.start);
    const __m512 scale = _mm512_set1_ps(own.scale);
    for (int b = 0; b < blocks; ++b, tile += kBlock) {
      const __m512i sum = _mm512_add_epi32(start, _mm512_load_si512(sums.of[b] + row * kBlock));
      _mm512_store_ps(tile,
                      _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, _mm512_load_ps(tile)));
    }
  }
}
#endif

template <int C, int B, class Tiles>
MINISGL_INLINE void group_sums(Tiles& tiles, const char* lines, int32_t* sums) {
  tiles.template zero<C>();
  tiles.template load<B>(lines, kTileBytes);
  tiles.template multiply_int8<C, 4, B>();
  tiles.template store<C>(sums, kTileBytes);
}

// A group is what one multiplication sums up.
template <class Tiles, Add add>
inline void int8_tile(const Quantised& x, int rows, const uint8_t* w, int blocks, Reading reading,
                      const float* scale, float* tile) {
  static_assert(kGroup == kTileBytes, "as above");
  Tiles tiles;
  GroupSums sums;
  const int64_t width = blocks * kBlock, block = kBlock * x.k;
  memset(tile, 0, rows * width * sizeof(float));
  for (int64_t group = 0; group < x.groups(); ++group) {
    const char* const lines = reinterpret_cast<const char*>(w) + group * kTileRows * kTileBytes;
    fetch_for(lines, blocks, reading);
    for (int row = 0; row < rows; row += kTileRows) {
      const char* const from = reinterpret_cast<const char*>(x.q);
      load_x<4>(tiles, from, x.k, row, rows, group * kGroup, x.k);
      group_sums<0, 5>(tiles, lines, sums.of[0]);
      if (blocks > 1) group_sums<1, 6>(tiles, lines + block, sums.of[1]);
      if (blocks > 2) group_sums<2, 7>(tiles, lines + 2 * block, sums.of[2]);
      if (blocks > 3) group_sums<3, 5>(tiles, lines + 3 * block, sums.of[3]);
      const int part = rows - row < kTileRows ? rows - row : kTileRows;
      add(sums, x.from_row(row), group, part, blocks, tile + row * width);
    }
  }
  for (int row = 0; row < rows; ++row, tile += width) {
    for (int64_t i = 0; i < width; ++i) tile[i] *= scale[i];
  }
}

inline Shape shape(int64_t m, Stored) {
  return {static_cast<int>(m <= kTileRows ? kTileRows : 2 * kTileRows), kBlocks};
}

}  // namespace minisgl::cpu::amx

namespace minisgl::cpu {

#if MINISGL_X86
inline const Kernels& amx_kernels() {
  static constexpr Kernels kernels = {amx::shape,
                                      amx::bf16_tile<Tiles>,
                                      amx::int8_tile<Tiles, amx::add_avx512>,
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
                                      amx::int8_tile<EmulatedTiles, amx::add_portable>,
                                      portable::quantise,
                                      portable::finish,
                                      EmulatedTiles::configure,
                                      EmulatedTiles::release};
  return kernels;
}

}  // namespace minisgl::cpu
