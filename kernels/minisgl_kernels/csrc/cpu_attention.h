// Attention over a paged cache: one token's (decode) and that of several new ones (prefill).
//
// Included once for each instruction set, behind cpu_lanes.h. A cache is [slots, kv_heads, dim];
// pointers to it are to one KV head, and rows of it are `stride` elements apart. dim is a multiple
// of 16. Weights are rounded to bf16 before they meet the values, sums are float32. Scores are in
// powers of two: `scale` has log2(e) in it.
//
// What is computed for a request depends on its own tokens alone, to the bit.

namespace minisgl::cpu::MINISGL_SET {

// --- decode: the queries of one KV head over a part of the keys ------------------------------

// sixteen scores of one query: q . key[i]
template <int kDim>
MINISGL_LANE_FN F sixteen_scores(const bf16* q, const bf16* const (&keys)[16], int given_dim) {
  const int dim = kDim > 0 ? kDim : given_dim, whole = dim / 32 * 32;
#if MINISGL_WIDTH == 16
  F sums[16];
  _Pragma("GCC unroll 16") for (int j = 0; j < 16; ++j) sums[j] = splat(0.0f);
  for (int i = 0; i < whole; i += 32) {
    const Pairs mine = load_pairs(q + i);
    _Pragma("GCC unroll 16") for (int j = 0; j < 16; ++j) {
      sums[j] = dot(sums[j], mine, load_pairs(keys[j] + i));
    }
  }
  if (whole < dim) {
    const Pairs mine = load_half_pairs(q + whole);
    _Pragma("GCC unroll 16") for (int j = 0; j < 16; ++j) {
      sums[j] = dot(sums[j], mine, load_half_pairs(keys[j] + whole));
    }
  }
  return sum_each(sums);
#else
  float scores[16];
  for (int j = 0; j < 16; ++j) {
    F sum = splat(0.0f);
    for (int i = 0; i < whole; i += 32) {
      sum = dot(sum, load_pairs(q + i), load_pairs(keys[j] + i));
    }
    if (whole < dim) {
      sum = dot(sum, load_half_pairs(q + whole), load_half_pairs(keys[j] + whole));
    }
    scores[j] = sum_of(sum);
  }
  return load(scores);
#endif
}

template <int kDim>
MINISGL_TARGET inline void score_keys(const bf16* q, int group, const bf16* keys, int64_t stride,
                                      const int32_t* slots, int count, int given_dim, float scale,
                                      Ahead& ahead, float* scores) {
  const int dim = kDim > 0 ? kDim : given_dim;
  for (int first = 0; first < count; first += 16) {
    const bf16* rows[16];
    for (int j = 0; j < 16; ++j) rows[j] = keys + slots[std::min(first + j, count - 1)] * stride;
    ahead.fetch(16);
    for (int g = 0; g < group; ++g) {
      const F some = sixteen_scores<kDim>(q + g * dim, rows, dim) * splat(scale);
      store(scores + g * kDecodeKeys + first,
            replace_from(some, count - first, -std::numeric_limits<float>::infinity()));
    }
  }
}

// out[r] = out[r] * factor[r] + sum of weights[r][key] * values[key], for kRows queries and kCols
// times 16 dimensions. `weights` are pairs of keys.
template <int kRows, int kCols>
MINISGL_TARGET inline void add_values(const uint32_t* weights, const float* factors,
                                      const bf16* values, int64_t stride, const int32_t* slots,
                                      int count, float* out, int dim) {
  F sums[kRows][kCols];
  _Pragma("GCC unroll 4") for (int r = 0; r < kRows; ++r) {
    _Pragma("GCC unroll 4") for (int c = 0; c < kCols; ++c) {
      sums[r][c] = load(out + r * dim + 16 * c) * splat(factors[r]);
    }
  }
  for (int key = 0; key < count; key += 2) {
    const bf16* const a = values + slots[key] * stride;
    const bf16* const b = values + slots[std::min(key + 1, count - 1)] * stride;
    Pairs both[kCols];
    _Pragma("GCC unroll 4") for (int c = 0; c < kCols; ++c) {
      both[c] = interleave(a + 16 * c, b + 16 * c);
    }
    _Pragma("GCC unroll 4") for (int r = 0; r < kRows; ++r) {
      const Pairs weight = splat(weights[r * (kDecodeKeys / 2) + key / 2]);
      _Pragma("GCC unroll 4") for (int c = 0; c < kCols; ++c) {
        sums[r][c] = dot(sums[r][c], weight, both[c]);
      }
    }
  }
  _Pragma("GCC unroll 4") for (int r = 0; r < kRows; ++r) {
    _Pragma("GCC unroll 4") for (int c = 0; c < kCols; ++c) {
      store(out + r * dim + 16 * c, sums[r][c]);
    }
  }
}

template <int kRows>
MINISGL_TARGET inline void add_value_rows(const uint32_t* weights, const float* factors,
                                          const bf16* values, int64_t stride, const int32_t* slots,
                                          int count, float* out, int dim) {
  constexpr int kCols = kWidth == 16 ? 4 : 1;
  int at = 0;
  for (; at + 16 * kCols <= dim; at += 16 * kCols) {
    add_values<kRows, kCols>(weights, factors, values + at, stride, slots, count, out + at, dim);
  }
  for (; at < dim; at += 16) {
    add_values<kRows, 1>(weights, factors, values + at, stride, slots, count, out + at, dim);
  }
}

// Turns scores [count], filled up to a multiple of 16, into weights: 2^(score - most), rounded, in
// `weights`; `most` and `total` are those of the row so far. Returns what is to be multiplied with
// what was summed up to now.
MINISGL_LANE_FN float weigh(const float* scores, int count, float* most, float* total,
                            bf16* weights) {
  F largest = splat(*most);
  for (int i = 0; i < count; i += 16) largest = max_of(largest, load(scores + i));
  const float now = max_of(largest);
  const float factor = *most == now ? 1.0f : exp2f(*most - now);
  F sums = splat(0.0f);
  for (int i = 0; i < count; i += 16) {
    const F weight = exp2_of(load(scores + i) - splat(now));
    sums = sums + weight;
    store_bf16(weights + i, weight);
  }
  *most = now;
  *total = *total * factor + sum_of(sums);
  return factor;
}

// `group` queries [group, dim] over the keys at `slots` [count]: values that are not yet divided by
// the sum of the weights [group, dim], the largest scores [group] and these sums [group]. What is
// `ahead` is fetched meanwhile.
MINISGL_TARGET inline void attend_part(const bf16* q, int group, const bf16* keys,
                                       const bf16* values, int64_t stride, const int32_t* slots,
                                       int64_t count, int dim, float scale, Ahead ahead,
                                       char* scratch, float* out, float* most, float* totals) {
  auto* const scores = reinterpret_cast<float*>(scratch);
  auto* const weights = reinterpret_cast<bf16*>(scores + group * kDecodeKeys);
  auto* const factors = reinterpret_cast<float*>(weights + group * kDecodeKeys);
  for (int i = 0; i < group * dim; i += 16) store(out + i, splat(0.0f));
  for (int g = 0; g < group; ++g) {
    most[g] = -std::numeric_limits<float>::infinity();
    totals[g] = 0.0f;
  }
  for (int64_t first = 0; first < count; first += kDecodeKeys, slots += kDecodeKeys) {
    const int n = static_cast<int>(std::min<int64_t>(kDecodeKeys, count - first));
    const auto score = dim == 64 ? score_keys<64> : dim == 128 ? score_keys<128> : score_keys<0>;
    score(q, group, keys, stride, slots, n, dim, scale, ahead, scores);
    for (int g = 0; g < group; ++g) {
      factors[g] = weigh(scores + g * kDecodeKeys, n, most + g, totals + g,
                         weights + g * kDecodeKeys);
    }
    for (int g = 0; g < group; g += 4) {
      const int rows = std::min(4, group - g);
      const auto add = rows == 1   ? add_value_rows<1>
                       : rows == 2 ? add_value_rows<2>
                       : rows == 3 ? add_value_rows<3>
                                   : add_value_rows<4>;
      add(reinterpret_cast<const uint32_t*>(weights + g * kDecodeKeys), factors + g, values, stride,
          slots, n, out + g * dim, dim);
    }
  }
}

// The parts of one request and KV head, kMostParts at most, each as `attend_part` left it, to bf16
// [group, dim].
MINISGL_TARGET inline void merge_parts(const float* parts, int64_t part_size, int count, int group,
                                       int dim, bf16* out) {
  for (int g = 0; g < group; ++g) {
    float most = -std::numeric_limits<float>::infinity(), total = 0.0f, factors[kMostParts];
    for (int p = 0; p < count; ++p) most = std::max(most, parts[p * part_size + group * dim + g]);
    for (int p = 0; p < count; ++p) {
      const float* const ends = parts + p * part_size + group * dim + g;
      factors[p] = ends[0] == most ? 1.0f : exp2f(ends[0] - most);
      total += ends[group] * factors[p];
    }
    const F inverse = splat(1.0f / total);
    for (int i = 0; i < dim; i += 16) {
      F sum = splat(0.0f);
      for (int p = 0; p < count; ++p) {
        sum = sum + load(parts + p * part_size + g * dim + i) * splat(factors[p]);
      }
      store_bf16(out + g * dim + i, sum * inverse);
    }
  }
}

// --- prefill: a block of queries over all keys up to them --------------------------------------

// sums[r][c] += a[r] . b[c] over `count` pairs: a [rows, pairs] with rows `lda` words apart, b
// [pairs, 16 columns each] with rows `ldb` words apart.
template <int kRows, int kCols>
MINISGL_LANE_FN void multiply(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb,
                              int count, F (&sums)[kRows][kCols]) {
  for (int i = 0; i < count; ++i, b += ldb) {
    Pairs columns[kCols];
    memcpy(columns, b, sizeof columns);
    _Pragma("GCC unroll 4") for (int r = 0; r < kRows; ++r) {
      const Pairs mine = splat(a[r * lda + i]);
      _Pragma("GCC unroll 4") for (int c = 0; c < kCols; ++c) {
        sums[r][c] = dot(sums[r][c], mine, columns[c]);
      }
    }
  }
}

// out [rows, columns] = factors[row] * out + a b; without factors, a b * scale.
template <int kRows, int kCols>
MINISGL_TARGET inline void tile(const uint32_t* a, int64_t lda, const uint32_t* b, int64_t ldb,
                                int count, const float* factors, float scale, float* out,
                                int64_t ldo) {
  F sums[kRows][kCols];
  _Pragma("GCC unroll 4") for (int r = 0; r < kRows; ++r) {
    _Pragma("GCC unroll 4") for (int c = 0; c < kCols; ++c) {
      sums[r][c] = factors == nullptr ? splat(0.0f)
                                      : load(out + r * ldo + 16 * c) * splat(factors[r]);
    }
  }
  multiply(a, lda, b, ldb, count, sums);
  _Pragma("GCC unroll 4") for (int r = 0; r < kRows; ++r) {
    _Pragma("GCC unroll 4") for (int c = 0; c < kCols; ++c) {
      store(out + r * ldo + 16 * c, sums[r][c] * splat(scale));
    }
  }
}

template <int kRows>
MINISGL_TARGET inline void tiles_of_rows(const uint32_t* a, int64_t lda, const uint32_t* b,
                                         int64_t ldb, int count, const float* factors, float scale,
                                         float* out, int64_t ldo, int columns) {
  constexpr int kCols = kWidth == 16 ? 4 : 1;
  int at = 0;
  for (; at + 16 * kCols <= columns; at += 16 * kCols) {
    tile<kRows, kCols>(a, lda, b + at, ldb, count, factors, scale, out + at, ldo);
  }
  for (; at < columns; at += 16) {
    tile<kRows, 1>(a, lda, b + at, ldb, count, factors, scale, out + at, ldo);
  }
}

// out [rows, columns] of up to four rows; columns are a multiple of 16.
MINISGL_TARGET inline void product(const uint32_t* a, int64_t lda, int rows, const uint32_t* b,
                                   int64_t ldb, int count, const float* factors, float scale,
                                   float* out, int64_t ldo, int columns) {
  const auto of_rows = rows == 1   ? tiles_of_rows<1>
                       : rows == 2 ? tiles_of_rows<2>
                       : rows == 3 ? tiles_of_rows<3>
                                   : tiles_of_rows<4>;
  of_rows(a, lda, b, ldb, count, factors, scale, out, ldo, columns);
}

// Keys at `slots` [count] as [dim / 2, kPrefillKeys] pairs of dimensions; zeros up to a multiple of
// 16 keys.
MINISGL_TARGET inline void pack_keys(const bf16* keys, int64_t stride, const int32_t* slots,
                                     int count, int dim, uint32_t* out) {
  for (int first = 0; first < count; first += 16) {
    const int n = std::min(16, count - first);
    for (int i = 0; i < dim; i += 32) {
      const int words = std::min(16, (dim - i) / 2);
#if MINISGL_WIDTH == 16
      Pairs rows[16];
      for (int j = 0; j < 16; ++j) {
        const bf16* const from = keys + slots[first + std::min(j, n - 1)] * stride + i;
        rows[j] = j >= n ? splat(0u) : words == 16 ? load_pairs(from) : load_half_pairs(from);
      }
      transpose(rows);
      for (int w = 0; w < words; ++w) {
        memcpy(out + (i / 2 + w) * kPrefillKeys + first, &rows[w], sizeof rows[w]);
      }
#else
      for (int j = 0; j < 16; ++j) {
        uint32_t row[16] = {};
        if (j < n) memcpy(row, keys + slots[first + j] * stride + i, words * sizeof(uint32_t));
        for (int w = 0; w < words; ++w) out[(i / 2 + w) * kPrefillKeys + first + j] = row[w];
      }
#endif
    }
  }
}

// Values at `slots` [count] as [count / 2, dim] pairs of keys; one more of zeros if count is odd.
MINISGL_TARGET inline void pack_values(const bf16* values, int64_t stride, const int32_t* slots,
                                       int count, int dim, uint32_t* out) {
  alignas(64) static constexpr bf16 kZeros[16] = {};
  for (int key = 0; key < count; key += 2) {
    const bf16* const a = values + slots[key] * stride;
    const bf16* const b = key + 1 < count ? values + slots[key + 1] * stride : nullptr;
    for (int i = 0; i < dim; i += 16) {
      const Pairs both = interleave(a + i, b == nullptr ? kZeros : b + i);
      memcpy(out + key / 2 * dim + i, &both, sizeof both);
    }
  }
}

// Queries at positions first to first + count - 1 of one request, of one KV head, over the keys at
// `slots` [first + count]. q and out are the heads of the first query, `group` of them side by side,
// and those of the next query `q_stride` and `out_stride` further.
MINISGL_TARGET inline void attend_block(const bf16* q, int64_t q_stride, int group,
                                        const bf16* keys, const bf16* values, int64_t stride,
                                        const int32_t* slots, int64_t first, int count, int dim,
                                        float scale, char* scratch, bf16* out, int64_t out_stride) {
  const int rows = count * group;
  const PrefillScratch at(scratch, rows, dim);
  for (int i = 0; i < count; ++i) {
    memcpy(at.queries + i * group * dim, q + i * q_stride, group * dim * sizeof(bf16));
  }
  for (int i = 0; i < rows * dim; i += 16) store(at.sums + i, splat(0.0f));
  for (int r = 0; r < rows; ++r) {
    at.most[r] = -std::numeric_limits<float>::infinity();
    at.totals[r] = 0.0f;
  }
  for (int64_t begin = 0; begin < first + count; begin += kPrefillKeys) {
    const int n = static_cast<int>(std::min<int64_t>(kPrefillKeys, first + count - begin));
    pack_keys(keys, stride, slots + begin, n, dim, at.keys);
    pack_values(values, stride, slots + begin, n, dim, at.values);
    for (int row = 0; row < rows; row += 4) {
      const int part = std::min(4, rows - row);
      const int64_t last = first + (row + part - 1) / group;  // position of the last query
      const int seen = static_cast<int>(std::min<int64_t>(n, last + 1 - begin));
      if (seen <= 0) continue;
      const int wide = (seen + 15) / 16 * 16;
      product(reinterpret_cast<const uint32_t*>(at.queries + row * dim), dim / 2, part, at.keys,
              kPrefillKeys, dim / 2, nullptr, scale, at.scores, kPrefillKeys, wide);
      float factors[4];
      for (int r = 0; r < part; ++r) {
        float* const scores = at.scores + r * kPrefillKeys;
        // Keys up to the query itself.
        const int limit = static_cast<int>(
            std::clamp<int64_t>(first + (row + r) / group + 1 - begin, 0, wide));
        for (int key = limit / 16 * 16; key < wide; key += 16) {
          store(scores + key, replace_from(load(scores + key), limit - key,
                                           -std::numeric_limits<float>::infinity()));
        }
        factors[r] = weigh(scores, wide, at.most + row + r, at.totals + row + r,
                           at.weights + r * kPrefillKeys);
      }
      product(reinterpret_cast<const uint32_t*>(at.weights), kPrefillKeys / 2, part, at.values, dim,
              (seen + 1) / 2, factors, 1.0f, at.sums + row * dim, dim, dim);
    }
  }
  for (int r = 0; r < rows; ++r) {
    bf16* const to = out + r / group * out_stride + r % group * dim;
    const F inverse = splat(1.0f / at.totals[r]);
    for (int i = 0; i < dim; i += 16) store_bf16(to + i, load(at.sums + r * dim + i) * inverse);
  }
}

}  // namespace minisgl::cpu::MINISGL_SET
