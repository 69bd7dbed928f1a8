// What each instruction set must provide for products, and that in plain C++.
#pragma once

#include "cpu_pack.h"

namespace minisgl::cpu {

// What becomes of the sums, after the bias is added to them. All of it is float32, rounded once.
enum class Then : int32_t {
  store = 0,   // out is bf16
  add = 1,     // out is bf16, and the product is added to it
  silu = 2,    // out is bf16 of outputs / 2: silu(gate) * up of gated weights
  logits = 3,  // out is float32
};

struct Epilogue {
  Then then;
  void* out;    // row i begins at element i * ldo
  int64_t ldo;
};

// Rows and blocks of a tile. Of gated weights a tile has both of gate and up, so blocks are even.
struct Shape {
  int rows, blocks;
  bool singly = false;  // blocks are read one after the other
};

// The scale of a group of activations, and what its sums of products with weights + 128 begin with:
// -128 times the sum of its q.
struct Group {
  float scale;
  int32_t start;
};

// Activations as int8 [rows, k], 0 beyond the inputs, and their groups [k / 64][rows].
struct Quantised {
  int8_t* q;
  Group* group;
  int64_t k, rows;

  MINISGL_INLINE int64_t groups() const { return k / kGroup; }
  MINISGL_INLINE Quantised from_row(int64_t row) const {
    return {q + row * k, group + row, k, rows};
  }
};

// How the weights of a tile are read: one block after the other or side by side. With the lines of
// block c those `ahead` + c * `apart` bytes behind the lines of the first are fetched.
struct Reading {
  bool singly;
  int64_t ahead, apart;
};

// One instruction set. A tile is float32 [rows, blocks * 16], aligned to 64 bytes.
struct Kernels {
  Shape (*shape)(int64_t m, Stored stored);  // of tiles, for products of m rows
  // Sums of x [rows, inputs], ldx apart, and `blocks` blocks of weights.
  void (*bf16_tile)(const bf16* x, int64_t ldx, int rows, const bf16* w, int64_t inputs,
                    int blocks, Reading reading, float* tile);
  // The same for int8, with the scales of the outputs.
  void (*int8_tile)(const Quantised& x, int rows, const uint8_t* w, int blocks, Reading reading,
                    const float* scale, float* tile);
  // Row x [inputs] as the first of `out`.
  void (*quantise)(const bf16* x, int64_t inputs, const Quantised& out);
  // Puts a tile of rows from `row` and of blocks from `block` where it belongs.
  void (*finish)(const float* tile, int rows, const Packed& w, int64_t block, int blocks,
                 const Epilogue& to, int64_t row);
  void (*begin)();  // before the tiles of a product, and after them, in each thread; or null
  void (*end)();
};

namespace portable {

inline void bf16_tile(const bf16* x, int64_t ldx, int rows, const bf16* w, int64_t inputs,
                      int blocks, Reading, float* tile) {
  const int64_t k = padded_inputs(inputs, Stored::bf16);
  for (int row = 0; row < rows; ++row, x += ldx, tile += blocks * kBlock) {
    for (int block = 0; block < blocks; ++block) {
      float sum[kBlock] = {};
      const bf16* from = w + block * kBlock * k;
      for (int64_t i = 0; i < inputs; i += 2, from += 2 * kBlock) {
        const float even = to_float(x[i]), odd = i + 1 < inputs ? to_float(x[i + 1]) : 0.0f;
        for (int j = 0; j < kBlock; ++j) {
          sum[j] += even * to_float(from[2 * j]) + odd * to_float(from[2 * j + 1]);
        }
      }
      memcpy(tile + block * kBlock, sum, sizeof sum);
    }
  }
}

inline void quantise(const bf16* x, int64_t inputs, const Quantised& out) {
  for (int64_t group = 0; group < out.groups(); ++group) {
    const int64_t from = group * kGroup, left = inputs - from;
    const int64_t count = left < kGroup ? left : kGroup;
    int8_t* const q = out.q + from;
    memset(q, 0, kGroup);
    const float scale = scale_of(largest_of(x + from, count));
    const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    int32_t sum = 0;
    for (int64_t i = 0; inverse > 0.0f && i < count; ++i) {
      q[i] = static_cast<int8_t>(lrintf(to_float(x[from + i]) * inverse));
      sum += q[i];
    }
    out.group[group * out.rows] = {scale, -128 * sum};
  }
}

inline void int8_tile(const Quantised& x, int rows, const uint8_t* w, int blocks, Reading,
                      const float* scale, float* tile) {
  for (int row = 0; row < rows; ++row, tile += blocks * kBlock) {
    const Quantised of = x.from_row(row);
    for (int block = 0; block < blocks; ++block) {
      float total[kBlock] = {};
      const uint8_t* from = w + block * kBlock * x.k;
      for (int64_t group = 0; group < x.groups(); ++group) {
        const Group& own = of.group[group * of.rows];
        int32_t sum[kBlock];
        for (int j = 0; j < kBlock; ++j) sum[j] = own.start;
        for (int64_t i = group * kGroup; i < (group + 1) * kGroup; i += 4, from += 4 * kBlock) {
          for (int j = 0; j < kBlock; ++j) {
            for (int p = 0; p < 4; ++p) sum[j] += of.q[i + p] * from[4 * j + p];
          }
        }
        for (int j = 0; j < kBlock; ++j) total[j] += static_cast<float>(sum[j]) * own.scale;
      }
      for (int j = 0; j < kBlock; ++j) {
        tile[block * kBlock + j] = total[j] * scale[block * kBlock + j];
      }
    }
  }
}

inline float silu(float x) { return x / (1.0f + expf(-x)); }

inline void finish_row(const float* sum, const Packed& w, int64_t block, int blocks,
                       const Epilogue& to, int64_t row) {
  const int step = to.then == Then::silu ? 2 : 1;
  for (int b = 0; b < blocks; b += step) {
    const float* const at = sum + b * kBlock;
    const float* const bias = w.bias == nullptr ? nullptr : w.bias + (block + b) * kBlock;
    const int64_t from = (block + b) / step * kBlock;
    const int64_t count = w.outputs / step - from < kBlock ? w.outputs / step - from : kBlock;
    bf16* const out = static_cast<bf16*>(to.out) + row * to.ldo + from;
    float* const wide = static_cast<float*>(to.out) + row * to.ldo + from;
    for (int64_t j = 0; j < count; ++j) {
      const float value = bias == nullptr ? at[j] : at[j] + bias[j];
      if (to.then == Then::store) {
        out[j] = to_bf16(value);
      } else if (to.then == Then::add) {
        out[j] = to_bf16(to_float(out[j]) + value);
      } else if (to.then == Then::logits) {
        wide[j] = value;
      } else {
        const float up = bias == nullptr ? at[kBlock + j] : at[kBlock + j] + bias[kBlock + j];
        out[j] = to_bf16(silu(value) * up);
      }
    }
  }
}

inline void finish(const float* tile, int rows, const Packed& w, int64_t block, int blocks,
                   const Epilogue& to, int64_t row) {
  for (int i = 0; i < rows; ++i) {
    finish_row(tile + i * blocks * kBlock, w, block, blocks, to, row + i);
  }
}

inline Shape shape(int64_t m, Stored) { return {static_cast<int>(m < 4 ? m : 4), 4}; }

}  // namespace portable

inline const Kernels& portable_kernels() {
  static constexpr Kernels kernels = {portable::shape,    portable::bf16_tile, portable::int8_tile,
                                      portable::quantise, portable::finish,    nullptr,
                                      nullptr};
  return kernels;
}

}  // namespace minisgl::cpu
