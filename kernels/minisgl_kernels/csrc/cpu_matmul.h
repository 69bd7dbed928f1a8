// y = x W^T for packed weights W and bf16 x, with what follows it in a decoder layer.
//
// All threads of a team call `matmul` with the same arguments, but for the lane, and wait for each
// other afterwards. Sums are float32. An output of a row depends on this row alone, to the bit: not
// on the number of rows nor on that of threads.
#pragma once

#include <stdlib.h>

#include <algorithm>
#include <new>

#include "cpu_matmul_amx.h"
#include "cpu_matmul_avx2.h"

namespace minisgl::cpu {

// Memory of one thread, aligned to 64 bytes, that grows and is used again.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  Scratch(Scratch&& other) noexcept : data_(other.data_), size_(other.size_) {
    other.data_ = nullptr;
    other.size_ = 0;
  }
  ~Scratch() { free(data_); }

  // At least `bytes`, whose content is undefined. What was given out before is lost.
  char* get(int64_t bytes) {
    if (bytes > size_) {
      free(data_);
      size_ = (bytes + 4095) / 4096 * 4096;
      data_ = static_cast<char*>(aligned_alloc(64, size_));
      if (data_ == nullptr) {
        size_ = 0;
        throw std::bad_alloc();
      }
    }
    return data_;
  }

 private:
  char* data_ = nullptr;
  int64_t size_ = 0;
};

// One thread's place in its team.
struct Lane {
  int thread = 0, threads = 1;
  Isa isa = Isa::portable;
  Scratch scratch;
};

struct Range {
  int64_t begin, end;
};

// The part of [0, total) that is this thread's, in units of `unit`.
inline Range share(int64_t total, int64_t unit, const Lane& lane) {
  const int64_t units = (total + unit - 1) / unit;
  const int64_t begin = units * lane.thread / lane.threads * unit;
  const int64_t end = units * (lane.thread + 1) / lane.threads * unit;
  return {std::min(begin, total), std::min(end, total)};
}

// For a product of m rows.
inline const Kernels& kernels_of(Isa isa, int64_t m, Stored stored) {
#if defined(MINISGL_EMULATE_TILES)
  if (isa == Isa::amx) return emulated_amx_kernels();
#endif
#if MINISGL_X86
  // A tile of int8 that is not full loses to vectors, which give the same bits.
  if (isa == Isa::amx && stored == Stored::int8 && m < kTileRows) return avx512_kernels();
  if (isa == Isa::amx) return amx_kernels();
  if (isa == Isa::avx512) return avx512_kernels();
  if (isa == Isa::avx2) return avx2_kernels();
#endif
  (void)isa, (void)m, (void)stored;
  return portable_kernels();
}

constexpr int64_t kInt8Rows = 240;  // quantised at once: they stay in the second cache

// How tile `part` of `parts` reads `count` blocks of weights, and has the next ones fetched, which
// lie `next` bytes behind them. Measured on Zen 5: a single tile waits for memory, and one stream of
// it is 15 % faster than two. Of several tiles, two have a half fetched each, which makes products
// of 16 rows 40 % faster than all of it by the first, and those half as fast again as none.
inline Reading reading_of(bool singly, int64_t part, int64_t parts, int64_t next, int64_t block,
                          int count) {
  constexpr int64_t most_singly = 128 << 10, most = 384 << 10;
  const int64_t bytes = count * block;
  if (singly) return {true, bytes <= most_singly ? next : 0, block};
  if (bytes > most) return {false, part == 0 ? 4096 : 0, block};
  if (parts == 1) return {false, next, block};
  return {false, part < count ? next + part * block : 0, 0};
}

// The first weights that this thread reads of `w`.
inline const char* beginning(const Packed& w, const Lane& lane) {
  const Range blocks = share(blocks_of(w), w.gated ? 2 : 1, lane);
  return static_cast<const char*>(w.data) + blocks.begin * block_bytes(w);
}

// By what a product of m rows is computed, how it is cut, and the memory that a thread needs for it.
struct Cut {
  const Kernels* kernels;
  Shape shape;
  int64_t chunk;                // rows that are computed, and if int8 quantised, at once
  int64_t tile_bytes, x_bytes;  // for a tile of sums, and for quantised rows behind it
  int64_t bytes() const { return tile_bytes + x_bytes; }
};

inline Cut cut_of(const Packed& w, int64_t m, Isa isa) {
  if (m == 0) return {};
  const Kernels* const kernels = &kernels_of(isa, m, w.stored);
  const Shape shape = kernels->shape(m, w.stored);
  const int64_t tile_rows = (shape.rows + 15) / 16 * 16;  // AMX stores 16
  const int64_t tile_bytes = tile_rows * shape.blocks * kBlock * sizeof(float);
  if (w.stored != Stored::int8) return {kernels, shape, m, tile_bytes, 0};
  const int64_t chunk = std::min(m, (kInt8Rows + shape.rows - 1) / shape.rows * shape.rows);
  const int64_t k = padded_inputs(w.inputs, Stored::int8);
  const int64_t row_bytes = k + k / kGroup * int64_t{sizeof(Group)};
  return {kernels, shape, chunk, tile_bytes, chunk * row_bytes};
}

// Products of x [m, w.inputs], whose rows are `ldx` apart. The epilogue says what becomes of them.
// `then` is the weight of the product after this one, whose beginning is fetched at the end.
inline void matmul(const Packed& w, const bf16* x, int64_t ldx, int64_t m, const Epilogue& to,
                   Lane& lane, const Packed* then = nullptr) {
  const Range blocks = share(blocks_of(w), w.gated ? 2 : 1, lane);
  if (m == 0 || blocks.begin == blocks.end) return;
  const Cut cut = cut_of(w, m, lane.isa);
  const Kernels& kernels = *cut.kernels;
  const Shape& shape = cut.shape;
  const int64_t bytes = block_bytes(w), chunk = cut.chunk;
  const bool int8 = w.stored == Stored::int8;
  Quantised x8{nullptr, nullptr, padded_inputs(w.inputs, Stored::int8), chunk};
  char* const memory = lane.scratch.get(cut.bytes());
  auto* const tile = reinterpret_cast<float*>(memory);
  if (int8) {
    x8.q = reinterpret_cast<int8_t*>(memory + cut.tile_bytes);
    x8.group = reinterpret_cast<Group*>(x8.q + chunk * x8.k);
  }
  if (kernels.begin != nullptr) kernels.begin();
  for (int64_t from = 0; from < m; from += chunk) {
    const int64_t rows = std::min(chunk, m - from);
    const int64_t parts = (rows + shape.rows - 1) / shape.rows;
    for (int64_t row = 0; int8 && row < rows; ++row) {
      kernels.quantise(x + (from + row) * ldx, w.inputs, x8.from_row(row));
    }
    for (int64_t block = blocks.begin; block < blocks.end; block += shape.blocks) {
      const int count = static_cast<int>(std::min<int64_t>(shape.blocks, blocks.end - block));
      const char* const data = static_cast<const char*>(w.data) + block * bytes;
      const bool more = block + count < blocks.end;
      const char* next = more ? data + count * bytes : data;
      if (!more && then != nullptr) next = beginning(*then, lane);
      for (int64_t row = 0; row < rows; row += shape.rows) {
        const int part = static_cast<int>(std::min<int64_t>(shape.rows, rows - row));
        const Reading reading =
            reading_of(shape.singly, row / shape.rows, parts, next - data, bytes, count);
        if (int8) {
          kernels.int8_tile(x8.from_row(row), part, reinterpret_cast<const uint8_t*>(data), count,
                            reading, w.scale + block * kBlock, tile);
        } else {
          kernels.bf16_tile(x + (from + row) * ldx, ldx, part,
                            reinterpret_cast<const bf16*>(data), w.inputs, count, reading, tile);
        }
        kernels.finish(tile, part, w, block, count, to, from + row);
      }
    }
  }
  if (kernels.end != nullptr) kernels.end();
}

}  // namespace minisgl::cpu
