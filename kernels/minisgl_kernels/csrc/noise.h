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

// Philox4x32-10 with counter (block, position, 0, 0): the words of tokens 4 block to 4 block + 3.
MINISGL_HD Words philox(uint32_t block, uint32_t position, uint32_t k0, uint32_t k1) {
  uint32_t c0 = block, c1 = position, c2 = 0, c3 = 0;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = wide_product(0xD2511F53u, c0), p1 = wide_product(0xCD9E8D57u, c2);
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return Words{{c0, c1, c2, c3}};
}

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
