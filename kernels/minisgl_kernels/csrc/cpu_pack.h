// Weights [outputs, inputs] in the order in which products read them.
//
// A block is 16 outputs. Of bf16 it is [K/2][16][2], of int8 [K/4][16][4]: 64 bytes hold two (four)
// inputs of each of its outputs, which is what one vdpbf16ps (vpdpbusd) takes, and 16 such lines
// are a tile of AMX. K is `inputs` rounded up to 32 (int8: 64); what is beyond inputs or outputs is
// zero. Gated weights (gate above up, of the same number of rows) have a block of gate, the block
// of up of the same outputs, and so on, so that one thread has both.
//
// int8: weight = q * scale[output], q from -127 to 127, to nearest, stored as q + 128: instructions
// multiply unsigned by signed numbers. Activations have a scale for each row and 64 inputs of it:
// some inputs are so much larger than others that one for the row would cost far more accuracy than
// the weights do. What the 128 adds is known when they are quantised. Where not all numbers are
// finite the scale is NaN; where the largest is below 4e-37 they are zero.
#pragma once

#include <math.h>

#include <limits>

#include "cpu_isa.h"

namespace minisgl::cpu {

constexpr int64_t kBlock = 16;       // outputs
constexpr float kLeast = 4e-37f;     // 127 / kLeast is finite
constexpr int64_t kGroup = 64;       // inputs of a row of activations that have one scale

enum class Stored : int32_t { bf16 = 0, int8 = 1 };

// A packed weight; the memory is the caller's. Each array is in the order of packed outputs.
struct Packed {
  const void* data;    // aligned to 64 bytes
  const float* scale;  // [blocks * 16]; int8 only
  const float* bias;   // [blocks * 16], or null
  int64_t outputs;     // rows of the weight: of gate and up together, if gated
  int64_t inputs;
  Stored stored;
  int32_t gated;
};

constexpr int64_t padded_inputs(int64_t inputs, Stored stored) {
  const int64_t step = stored == Stored::bf16 ? 32 : 64;
  return (inputs + step - 1) / step * step;
}

constexpr int64_t blocks_of(int64_t outputs, bool gated) {
  return gated ? 2 * ((outputs / 2 + kBlock - 1) / kBlock) : (outputs + kBlock - 1) / kBlock;
}

inline int64_t blocks_of(const Packed& w) { return blocks_of(w.outputs, w.gated); }

// Bytes of a block.
constexpr int64_t block_bytes(int64_t inputs, Stored stored) {
  return kBlock * padded_inputs(inputs, stored) * (stored == Stored::bf16 ? 2 : 1);
}

inline int64_t block_bytes(const Packed& w) { return block_bytes(w.inputs, w.stored); }

// The row of the weight that is packed output `at`, or -1 for one that is padding.
constexpr int64_t source_row(int64_t at, int64_t outputs, bool gated) {
  if (!gated) return at < outputs ? at : -1;
  const int64_t half = outputs / 2, row = at / (2 * kBlock) * kBlock + at % kBlock;
  return row < half ? row + (at / kBlock % 2) * half : -1;
}

// Where row `row` of the weight is among packed outputs.
constexpr int64_t packed_row(int64_t row, int64_t outputs, bool gated) {
  if (!gated) return row;
  const int64_t half = outputs / 2, in = row % half;
  return in / kBlock * 2 * kBlock + (row / half) * kBlock + in % kBlock;
}

// `weight` [outputs, inputs] row by row, to `data` of blocks * block_bytes.
inline void pack_bf16(const bf16* weight, int64_t outputs, int64_t inputs, bool gated, bf16* data) {
  const int64_t k = padded_inputs(inputs, Stored::bf16), blocks = blocks_of(outputs, gated);
  for (int64_t block = 0; block < blocks; ++block, data += kBlock * k) {
    memset(data, 0, kBlock * k * sizeof(bf16));
    for (int64_t j = 0; j < kBlock; ++j) {
      const int64_t row = source_row(block * kBlock + j, outputs, gated);
      if (row < 0) continue;
      const bf16* const from = weight + row * inputs;
      bf16* to = data + 2 * j;  // in the first cache by now
      for (int64_t i = 0; i + 1 < inputs; i += 2, to += 2 * kBlock) {
        memcpy(to, from + i, 2 * sizeof(bf16));
      }
      if (inputs % 2 != 0) *to = from[inputs - 1];
    }
  }
}

// What a row is divided by to become int8, from its largest magnitude (as bf16 without sign).
inline float scale_of(bf16 largest) {
  if (largest >= 0x7f80) return std::numeric_limits<float>::quiet_NaN();
  const float value = to_float(largest);
  return value < kLeast ? 0.0f : value / 127.0f;
}

inline bf16 largest_of(const bf16* row, int64_t count) {
  bf16 largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const bf16 value = row[i] & 0x7fff;
    largest = value > largest ? value : largest;
  }
  return largest;
}

// The same for int8, with `scale` of blocks * 16.
inline void pack_int8(const bf16* weight, int64_t outputs, int64_t inputs, bool gated,
                      uint8_t* data, float* scale) {
  const int64_t k = padded_inputs(inputs, Stored::int8), blocks = blocks_of(outputs, gated);
  memset(data, 128, blocks * kBlock * k);
  for (int64_t at = 0; at < blocks * kBlock; ++at) {
    const int64_t row = source_row(at, outputs, gated);
    const bf16* const from = weight + row * inputs;
    scale[at] = row < 0 ? 0.0f : scale_of(largest_of(from, inputs));
    if (!(scale[at] > 0.0f)) continue;
    const float inverse = 1.0f / scale[at];
    uint8_t* to = data + at / kBlock * kBlock * k + at % kBlock * 4;
    for (int64_t i = 0; i < inputs; ++i) {
      to[i / 4 * 4 * kBlock + i % 4] =
          static_cast<uint8_t>(128 + lrintf(to_float(from[i]) * inverse));
    }
  }
}

// Row `row` of the weight, [inputs], as bf16: for a table that is embedding and LM head at once.
inline void unpack_row(const Packed& w, int64_t row, bf16* out) {
  const int64_t at = packed_row(row, w.outputs, w.gated);
  const char* block = static_cast<const char*>(w.data) + at / kBlock * block_bytes(w);
  if (w.stored == Stored::bf16) {
    const bf16* from = reinterpret_cast<const bf16*>(block) + at % kBlock * 2;
    for (int64_t i = 0; i < w.inputs; ++i) out[i] = from[i / 2 * 2 * kBlock + i % 2];
  } else {
    const uint8_t* from = reinterpret_cast<const uint8_t*>(block) + at % kBlock * 4;
    for (int64_t i = 0; i < w.inputs; ++i) {
      const int32_t q = from[i / 4 * 4 * kBlock + i % 4] - 128;
      out[i] = to_bf16(static_cast<float>(q) * w.scale[at]);
    }
  }
}

}  // namespace minisgl::cpu
