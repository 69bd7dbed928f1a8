// The kernels of a decoder layer beside its products, for each instruction set.
#pragma once

#include <math.h>

#include <algorithm>
#include <limits>

#include "cpu_isa.h"

namespace minisgl::cpu {

constexpr int kMostParts = 16;     // that a decode is cut into
constexpr int kDecodeKeys = 256;   // keys that a part of a decode holds the scores of
constexpr int kPrefillKeys = 128;  // the same of a block of queries
constexpr int kBlockRows = 96;     // queries times heads of a block, about

// Keys and values that this thread reads next, to be fetched from memory while it computes: their
// rows are too far apart for the CPU to guess.
struct Ahead {
  const bf16 *keys, *values;  // of a KV head
  int64_t stride;
  const int32_t* slots;
  int64_t count;
  int64_t bytes;  // of a row

  // The next `some` of them.
  MINISGL_INLINE void fetch(int64_t some) {
    for (; some > 0 && count > 0; --some, --count, ++slots) {
      const char* const key = reinterpret_cast<const char*>(keys + *slots * stride);
      const char* const value = reinterpret_cast<const char*>(values + *slots * stride);
      for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(key + i, 0, 2);  // to L2
        __builtin_prefetch(value + i, 0, 2);
      }
    }
  }
};

// Bytes that `attend_part` needs for `group` queries.
constexpr int64_t part_scratch(int group) {
  return static_cast<int64_t>(group) * (kDecodeKeys * 6 + 4) + 64;
}

// Where `attend_block` keeps what.
struct PrefillScratch {
  PrefillScratch(char* memory, int rows, int dim) {
    char* at = memory;
    const auto take = [&at](auto*& field, int64_t count) {
      field = reinterpret_cast<std::remove_reference_t<decltype(field)>>(at);
      at += (count * sizeof(*field) + 63) / 64 * 64;
    };
    take(keys, int64_t{dim} / 2 * kPrefillKeys);
    take(values, int64_t{dim} * kPrefillKeys / 2);
    take(scores, 4 * kPrefillKeys);
    take(weights, 4 * kPrefillKeys);
    take(queries, int64_t{rows} * dim);
    take(sums, int64_t{rows} * dim);
    take(most, rows);
    take(totals, rows);
    bytes = at - memory;
  }

  uint32_t *keys, *values;
  float* scores;
  bf16 *weights, *queries;
  float *sums, *most, *totals;
  int64_t bytes;
};

struct LayerKernels {
  void (*rms_norm)(const bf16* x, const bf16* weight, float eps, int64_t size, bf16* out);
  void (*turn_head)(const bf16* x, const bf16* norm, float eps, const float* turn, int64_t dim,
                    bf16* out);
  void (*attend_part)(const bf16* q, int group, const bf16* keys, const bf16* values,
                      int64_t stride, const int32_t* slots, int64_t count, int dim, float scale,
                      Ahead ahead, char* scratch, float* out, float* most, float* totals);
  void (*merge_parts)(const float* parts, int64_t part_size, int count, int group, int dim,
                      bf16* out);
  void (*attend_block)(const bf16* q, int64_t q_stride, int group, const bf16* keys,
                       const bf16* values, int64_t stride, const int32_t* slots, int64_t first,
                       int count, int dim, float scale, char* scratch, bf16* out,
                       int64_t out_stride);
};

}  // namespace minisgl::cpu

#define MINISGL_SET lanes4
#define MINISGL_WIDTH 4
#define MINISGL_TARGET
#include "cpu_layer_set.h"

#if MINISGL_X86
#define MINISGL_SET lanes8
#define MINISGL_WIDTH 8
#define MINISGL_TARGET MINISGL_AVX2
#include "cpu_layer_set.h"

#define MINISGL_SET lanes16
#define MINISGL_WIDTH 16
#define MINISGL_TARGET MINISGL_AVX512
#include "cpu_layer_set.h"

// Processors with tiles take two cycles or more for a vdpbf16ps, and half a one for an FMA.
#define MINISGL_SET lanes16_fma
#define MINISGL_WIDTH 16
#define MINISGL_TARGET MINISGL_AVX512
#define MINISGL_DOT_BY_FMA
#include "cpu_layer_set.h"
#undef MINISGL_DOT_BY_FMA
#endif

namespace minisgl::cpu {

inline const LayerKernels& layer_kernels(Isa isa) {
#if MINISGL_X86
  if (isa == Isa::amx) return lanes16_fma::kLayerKernels;
  if (isa == Isa::avx512) return lanes16::kLayerKernels;
  if (isa == Isa::avx2) return lanes8::kLayerKernels;
#endif
  (void)isa;
  return lanes4::kLayerKernels;
}

}  // namespace minisgl::cpu
