// The noise of sampling, as minisgl/engine/philox.py defines it, for host and device.
//
// Compile with -ffp-contract=off or -fmad=false: each operation of the exact part is rounded on its
// own. Fused operations are written as fmaf.
#pragma once

#include <stdint.h>
#include <string.h>

#include <cmath>

#ifdef __CUDACC__
#define MINISGL_HD __host__ __device__ inline
#else
#define MINISGL_HD inline
#endif

namespace minisgl {

struct Words {
  uint32_t of[4];
};

MINISGL_HD uint64_t wide_product(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint64_t product;  // one instruction; of the plain product the compiler makes two
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return uint64_t{a} * b;
#endif
}

// Philox4x32-10 with counters (block, position, 0, 0), whose words are those of tokens 4 block to
// 4 block + 3. What is alike in all blocks of a row is computed once: the keys of the rounds, and
// what the first three rounds make of the counter's zeros and the position.
class Philox {
 public:
  MINISGL_HD Philox(uint32_t position, uint32_t k0, uint32_t k1) : first_(k1) {
    const uint64_t fixed = wide_product(kMultiplier0, position ^ k0);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < 9; ++i) k0 += 0x9E3779B9u, k1 += 0xBB67AE85u, k0_[i] = k0, k1_[i] = k1;
    k1_[0] ^= static_cast<uint32_t>(fixed >> 32);
    k1_[1] ^= static_cast<uint32_t>(fixed);
  }

  MINISGL_HD Words words(uint32_t block) const {
    // After the first round c0 is `fixed`'s factor and c1 is 0.
    uint64_t p0 = wide_product(kMultiplier0, block), p1;
    uint32_t c0 = 0, c1 = 0, c2 = high(p0) ^ first_, c3 = static_cast<uint32_t>(p0);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int i = 0; i < 9; ++i) {
      p0 = i == 0 ? 0 : wide_product(kMultiplier0, c0);  // in the keys
      p1 = wide_product(kMultiplier1, c2);
      c0 = high(p1) ^ c1 ^ k0_[i];
      c1 = static_cast<uint32_t>(p1);
      c2 = high(p0) ^ c3 ^ k1_[i];
      c3 = static_cast<uint32_t>(p0);
    }
    return Words{{c0, c1, c2, c3}};
  }

 private:
  static constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
  MINISGL_HD static uint32_t high(uint64_t product) { return static_cast<uint32_t>(product >> 32); }

  uint32_t first_, k0_[9], k1_[9];
};

// Natural logarithm of a positive normal number.
MINISGL_HD double log_exact(double v) {
  uint64_t bits;
  memcpy(&bits, &v, 8);
  int e = static_cast<int>(bits >> 52) - 1022;
  bits = (bits & 0x000FFFFFFFFFFFFFull) | 0x3FE0000000000000ull;  // m in [1/2, 1)
  double m;
  memcpy(&m, &bits, 8);
  if (m < 0.7071067811865476) m *= 2, e -= 1;
  const double s = (m - 1) / (m + 1), z = s * s;
  double p = 1.0 / 21;
  p = p * z + 1.0 / 19;
  p = p * z + 1.0 / 17;
  p = p * z + 1.0 / 15;
  p = p * z + 1.0 / 13;
  p = p * z + 1.0 / 11;
  p = p * z + 1.0 / 9;
  p = p * z + 1.0 / 7;
  p = p * z + 1.0 / 5;
  p = p * z + 1.0 / 3;
  p = p * z + 1.0;
  return e * 0.6931471805599453 + (2 * s) * p;
}

MINISGL_HD double gumbel(uint32_t word) {
  return -log_exact(-log_exact((2.0 * word + 1.0) * 0x1p-33));
}

constexpr float kMaxNoise = 22.874f;

// More than gumbel(word), by at least 5e-5, and never falling as the word rises. With n = ~word,
// w = 1 - u is a little over n 2^-32; -log(u) >= w, so the noise is at most -log(w). And a float's
// bits, read as an integer, are a lower bound of its binary logarithm (a chord of a concave curve).
MINISGL_HD float noise_bound(uint32_t word) {
  const float n = static_cast<float>(~word);
  int32_t bits;
  memcpy(&bits, &n, 4);
  // (32 - (bits 2^-23 - 127)) ln 2 + 1e-4
  return fmaf(static_cast<float>(bits), -8.2629583e-8f, 110.210402f + 1e-4f);
}

// Less than gumbel(word), by 5e-5 to 2e-4: for few words, because it takes two logarithms. Each is
// taken where its argument is known well: of u up to a half, and of 1 - w beyond.
MINISGL_HD float noise_floor(uint32_t word) {
  const float scale = 0x1p-32f;
  const float of_u = word < 0x80000000u
                         ? -logf((static_cast<float>(word) + 0.5f) * scale)
                         : -log1pf(-(static_cast<float>(~word) + 0.5f) * scale);
  return -logf(of_u) - 1e-4f;
}

}  // namespace minisgl
