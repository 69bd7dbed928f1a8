// The draw of sampling on a CPU: the token with the largest logit plus Gumbel noise.
//
// What is computed is defined in minisgl/engine/philox.py, to the bit; compile with
// -ffp-contract=off. Words of many blocks are made at once in vector registers. The two logarithms
// of a noise are computed only for tokens that may win: a bound from the bits of the word alone
// rules out all but a few.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

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

// For each of n rows of logits [n, stride], of which the first vocab_size count, the drawn token.
// tokens [n] holds the ids of the largest logits, and is overwritten unless a row has NaN or +inf.
extern "C" void gumbel_draw(const float* logits, std::int64_t n, std::int64_t stride,
                            std::int64_t vocab_size, const float* temperature, const float* least,
                            const std::int64_t* last, const std::int64_t* seeds,
                            const std::int64_t* positions, std::int64_t* tokens) {
  for (std::int64_t row = 0; row < n; ++row) {
    const float* x = logits + row * stride;
    const float largest = x[tokens[row]];
    if (!std::isfinite(largest)) continue;
    Best best;
    const auto take = [&](std::int64_t begin) {
      scan(x, begin, std::min<std::int64_t>(kTokens, vocab_size - begin), largest,
           temperature[row], least[row], last[row], static_cast<std::uint32_t>(positions[row]),
           static_cast<std::uint64_t>(seeds[row]), &best);
    };
    for (std::int64_t begin = 0; begin < vocab_size; begin += kTokens) take(begin);
    if (best.token >= 0) tokens[row] = best.token;
  }
}
