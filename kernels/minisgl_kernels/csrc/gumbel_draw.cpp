// The draw of sampling on a CPU: of the tokens that pass the filters, the one with the largest logit
// plus Gumbel noise.
//
// What is computed is defined in minisgl/engine/philox.py, to the bit; compile with
// -ffp-contract=off. Words of many blocks are made at once in vector registers. The two logarithms
// of a noise are computed only for tokens that may win: a bound from the bits of the word alone
// rules out all but a few.
#include "filter_bounds.h"

namespace {

constexpr int kBlocks = 64;  // of four tokens each, made at once
constexpr int kTokens = 4 * kBlocks;
constexpr double kLn2 = 0.6931471805599453;
constexpr double kSqrtHalf = 0.7071067811865476;
constexpr double kMaxNoise = 22.8739;

void philox(std::uint32_t first_block, std::uint32_t position, std::uint64_t seed,
            std::uint32_t (&words)[4][kBlocks]) {
  std::uint32_t(&c0)[kBlocks] = words[0], (&c1)[kBlocks] = words[1];
  std::uint32_t(&c2)[kBlocks] = words[2], (&c3)[kBlocks] = words[3];
  for (int i = 0; i < kBlocks; ++i) {
    c0[i] = first_block + i, c1[i] = position, c2[i] = 0, c3[i] = 0;
  }
  std::uint32_t k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kBlocks; ++i) {
      const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * c0[i];
      const std::uint64_t p1 = std::uint64_t{0xCD9E8D57u} * c2[i];
      c0[i] = static_cast<std::uint32_t>(p1 >> 32) ^ c1[i] ^ k0;
      c1[i] = static_cast<std::uint32_t>(p1);
      c2[i] = static_cast<std::uint32_t>(p0 >> 32) ^ c3[i] ^ k1;
      c3[i] = static_cast<std::uint32_t>(p0);
    }
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
}

double log_exact(double v) {
  int e;
  double m = std::frexp(v, &e);
  if (m < kSqrtHalf) m *= 2, e -= 1;
  const double s = (m - 1) / (m + 1), z = s * s;
  double p = 1.0 / 21;
  for (int n = 19; n > 0; n -= 2) p = p * z + 1.0 / n;
  return e * kLn2 + (2 * s) * p;
}

double gumbel(std::uint32_t word) {
  return -log_exact(-log_exact((2.0 * word + 1.0) * 0x1p-33));
}

// Never less than gumbel(word): with w = 1 - u, -log(u) >= w, so the noise is at most -log(w); and
// a float's bits, read as an integer, are a lower bound of its binary logarithm.
inline float noise_bound(std::uint32_t word) {
  const float w = static_cast<float>(~word >> 1) + 0.25f;  // w * 2^31, rounded
  std::int32_t bits;
  std::memcpy(&bits, &w, 4);
  const float log2_w = static_cast<float>(bits) * 0x1p-23f - 127.0f;
  return (31.0f - log2_w) * 0.69314718f + 1e-4f;
}

struct Best {
  double score = -std::numeric_limits<double>::infinity();
  std::int64_t token = -1;
};

void scan(const float* logits, std::int64_t begin, std::int64_t count, float largest,
          float temperature, float least, std::int64_t last, std::uint32_t position,
          std::uint64_t seed, Best* best) {
  float y[kTokens];
  const float* x = logits + begin;
  for (std::int64_t i = 0; i < count; ++i) y[i] = (x[i] - largest) / temperature;
  for (std::int64_t i = count; i < kTokens; ++i) y[i] = -std::numeric_limits<float>::infinity();
  // No word is needed where even the largest noise would lose.
  float floor = std::max(least, static_cast<float>(best->score - kMaxNoise) - 1e-4f);
  int any = 0;
  for (int i = 0; i < kTokens; ++i) any |= y[i] >= floor;
  if (!any) return;

  std::uint32_t words[4][kBlocks];
  philox(static_cast<std::uint32_t>(begin / 4), position, seed, words);
  float bound[kTokens];
  for (int b = 0; b < kBlocks; ++b) {
    for (int j = 0; j < 4; ++j) bound[4 * b + j] = y[4 * b + j] + noise_bound(words[j][b]);
  }
  for (int group = 0; group < kTokens; group += 16) {
    const float needed = static_cast<float>(best->score) - 1e-4f;
    int may_win = 0;
    for (int i = group; i < group + 16; ++i) may_win |= (bound[i] >= needed) & (y[i] >= least);
    if (!may_win) continue;
    for (int i = group; i < group + 16; ++i) {
      if (!(bound[i] >= needed && y[i] >= least)) continue;
      if (y[i] == least && begin + i > last) continue;
      const double score = static_cast<double>(y[i]) + gumbel(words[i % 4][i / 4]);
      if (score > best->score) *best = {score, begin + i};
    }
  }
}

}  // namespace

// Filled in Python: minisgl_kernels/sampling.py. Columns have an entry for each row.
struct Draw {
  const float* logits;  // rows `stride` apart, of which the first vocab_size count
  std::int64_t stride, vocab_size;
  const float* temperature;
  const std::int64_t* top_k;  // null: no row has this limit; so for the next two
  const double *top_p, *min_p;
  const std::int64_t *seeds, *positions;
  std::int64_t* tokens;  // ids of the largest logits; overwritten unless a row has NaN or +inf
};

// Draws for one row; rows may be drawn by several threads.
extern "C" void draw_row(const void* of, std::int64_t row) {
  const Draw& d = *static_cast<const Draw*>(of);
  const float* x = d.logits + row * d.stride;
  const float largest = x[d.tokens[row]], temperature = d.temperature[row];
  if (!std::isfinite(largest)) return;
  float least = -std::numeric_limits<float>::infinity();
  std::int64_t last = d.vocab_size;
  const std::int64_t top_k = d.top_k == nullptr ? d.vocab_size : d.top_k[row];
  const double top_p = d.top_p == nullptr ? 1.0 : d.top_p[row];
  if (top_k < d.vocab_size || top_p < 1) {
    thread_local minisgl::FilterBounds bounds;
    bounds.find(x, d.vocab_size, largest, temperature, top_k, top_p, &least, &last);
  }
  const float floor = d.min_p == nullptr ? least : static_cast<float>(std::log(d.min_p[row]));
  if (floor > least) least = floor, last = d.vocab_size;
  Best best;
  for (std::int64_t begin = 0; begin < d.vocab_size; begin += kTokens) {
    scan(x, begin, std::min<std::int64_t>(kTokens, d.vocab_size - begin), largest, temperature,
         least, last, static_cast<std::uint32_t>(d.positions[row]),
         static_cast<std::uint64_t>(d.seeds[row]), &best);
  }
  if (best.token >= 0) d.tokens[row] = best.token;
}

extern "C" void draw_rows(const void* of, std::int64_t rows) {
  for (std::int64_t row = 0; row < rows; ++row) draw_row(of, row);
}
