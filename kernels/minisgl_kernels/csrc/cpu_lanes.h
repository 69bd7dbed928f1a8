// Sixteen lanes of float32, as the instruction set at hand holds them: in one register or several.
//
// Included once for each instruction set, so it has no guard. Before it come
//   MINISGL_TARGET  the attribute of functions
//   MINISGL_WIDTH   floats of a register: 16, 8 or 4
//   MINISGL_SET     the namespace
//   MINISGL_DOT_BY_FMA  if defined, no vdpbf16ps
// Every function is inlined, so that none is called whose instructions the CPU may lack.

namespace minisgl::cpu::MINISGL_SET {

#define MINISGL_LANE_FN MINISGL_TARGET MINISGL_INLINE

constexpr int kWidth = MINISGL_WIDTH;
constexpr int kParts = 16 / kWidth;

using FloatReg = float __attribute__((vector_size(4 * MINISGL_WIDTH)));
using IntReg = int32_t __attribute__((vector_size(4 * MINISGL_WIDTH)));
using WordReg = uint32_t __attribute__((vector_size(4 * MINISGL_WIDTH)));
using HalfReg = uint16_t __attribute__((vector_size(2 * MINISGL_WIDTH)));

struct F {
  FloatReg part[kParts];
};

// Pairs of bf16: the first of each is in the low half of the word.
struct Pairs {
  WordReg part[kParts];
};

#define MINISGL_EACH _Pragma("GCC unroll 4") for (int i = 0; i < kParts; ++i)

MINISGL_LANE_FN F operator+(F a, F b) {
  MINISGL_EACH a.part[i] += b.part[i];
  return a;
}
MINISGL_LANE_FN F operator-(F a, F b) {
  MINISGL_EACH a.part[i] -= b.part[i];
  return a;
}
MINISGL_LANE_FN F operator*(F a, F b) {
  MINISGL_EACH a.part[i] *= b.part[i];
  return a;
}

MINISGL_LANE_FN F splat(float value) {
  F r;
  MINISGL_EACH r.part[i] = value - FloatReg{};  // x - 0, not 0 + x: that would lose -0
  return r;
}

MINISGL_LANE_FN Pairs splat(uint32_t value) {
  Pairs r;
  MINISGL_EACH r.part[i] = value - WordReg{};
  return r;
}

MINISGL_LANE_FN F load(const float* from) {
  F r;
  memcpy(&r, from, sizeof r);
  return r;
}

MINISGL_LANE_FN void store(float* to, F value) { memcpy(to, &value, sizeof value); }

MINISGL_LANE_FN F max_of(F a, F b) {
  MINISGL_EACH a.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
  return a;
}

// Lanes from `count` on become `value`.
MINISGL_LANE_FN F replace_from(F a, int count, float value) {
  alignas(64) static constexpr int32_t kPlaces[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                      8, 9, 10, 11, 12, 13, 14, 15};
  MINISGL_EACH {
    IntReg place;
    memcpy(&place, kPlaces + i * kWidth, sizeof place);
    a.part[i] = place < count ? a.part[i] : value - FloatReg{};
  }
  return a;
}

MINISGL_LANE_FN float sum_of(F a) {
#if MINISGL_WIDTH == 16
  return _mm512_reduce_add_ps(a.part[0]);
#else
  FloatReg total = a.part[0];
  for (int i = 1; i < kParts; ++i) total += a.part[i];
  float lanes[kWidth];
  memcpy(lanes, &total, sizeof lanes);
  for (int half = kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
#endif
}

MINISGL_LANE_FN float max_of(F a) {
#if MINISGL_WIDTH == 16
  return _mm512_reduce_max_ps(a.part[0]);
#else
  float lanes[16];
  store(lanes, a);
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  }
  return lanes[0];
#endif
}

MINISGL_LANE_FN F load_bf16(const bf16* from) {
  F r;
  MINISGL_EACH {
    HalfReg half;
    memcpy(&half, from + i * kWidth, sizeof half);
    r.part[i] = reinterpret_cast<FloatReg>(__builtin_convertvector(half, WordReg) << 16);
  }
  return r;
}

// To nearest, ties to even.
MINISGL_LANE_FN void store_bf16(bf16* to, F value) {
#if MINISGL_WIDTH == 16
  const __m256bh half = _mm512_cvtneps_pbh(value.part[0]);
  memcpy(to, &half, sizeof half);
#else
  MINISGL_EACH {
    const WordReg bits = reinterpret_cast<WordReg>(value.part[i]);
    const HalfReg half =
        __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, HalfReg);
    memcpy(to + i * kWidth, &half, sizeof half);
  }
#endif
}

// 32 bf16 that follow each other, or 16 and zeros.
MINISGL_LANE_FN Pairs load_pairs(const bf16* from) {
  Pairs r;
  memcpy(&r, from, sizeof r);
  return r;
}

MINISGL_LANE_FN Pairs load_half_pairs(const bf16* from) {
  Pairs r{};
  memcpy(&r, from, sizeof r / 2);
  return r;
}

// The pairs (a[i], b[i]) of 16 bf16 each.
MINISGL_LANE_FN Pairs interleave(const bf16* a, const bf16* b) {
  Pairs r;
  MINISGL_EACH {
    HalfReg low, high;
    memcpy(&low, a + i * kWidth, sizeof low);
    memcpy(&high, b + i * kWidth, sizeof high);
    r.part[i] =
        __builtin_convertvector(low, WordReg) | __builtin_convertvector(high, WordReg) << 16;
  }
  return r;
}

// sum + a.first * b.first + a.second * b.second
MINISGL_LANE_FN F dot(F sum, Pairs a, Pairs b) {
#if MINISGL_WIDTH == 16 && !defined(MINISGL_DOT_BY_FMA)
  sum.part[0] = _mm512_dpbf16_ps(sum.part[0], reinterpret_cast<__m512bh>(a.part[0]),
                                 reinterpret_cast<__m512bh>(b.part[0]));
#else
  MINISGL_EACH {
    const WordReg a0 = a.part[i] << 16, a1 = a.part[i] & 0xffff0000u;
    const WordReg b0 = b.part[i] << 16, b1 = b.part[i] & 0xffff0000u;
    sum.part[i] += reinterpret_cast<FloatReg>(a0) * reinterpret_cast<FloatReg>(b0);
    sum.part[i] += reinterpret_cast<FloatReg>(a1) * reinterpret_cast<FloatReg>(b1);
  }
#endif
  return sum;
}

// 2^x for x of at most 0, with an error of 2e-7 of it; about 0 for x below -126.
MINISGL_LANE_FN F exp2_of(F x) {
  F r;
  MINISGL_EACH {
    const FloatReg v = x.part[i];
    // n = x to nearest: the low bits of a number so large that they count in ones.
    const FloatReg big = v + 12582912.0f;
    const FloatReg n = big - 12582912.0f, rest = v - n;
    FloatReg p = rest * 1.535336188319500e-4f + 1.339887440266574e-3f;
    p = p * rest + 9.618437357674640e-3f;
    p = p * rest + 5.550332471162809e-2f;
    p = p * rest + 2.402264791363012e-1f;
    p = p * rest + 6.931472028550421e-1f;
    p = p * rest + 1.0f;
#if MINISGL_WIDTH == 16
    r.part[i] = _mm512_scalef_ps(p, n);
#else
    const WordReg power = reinterpret_cast<WordReg>(p) + (reinterpret_cast<WordReg>(big) << 23);
    r.part[i] = reinterpret_cast<FloatReg>(power & reinterpret_cast<WordReg>(v > -126.0f));
#endif
  }
  return r;
}

#if MINISGL_WIDTH == 16
// Lane i of the result is the sum of all lanes of v[i].
MINISGL_LANE_FN F sum_each(const F (&of)[16]) {
  __m512 v[16], s[4];
  memcpy(v, of, sizeof v);
  _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) {
    const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(v[4 * i], v[4 * i + 1]),
                                   _mm512_unpackhi_ps(v[4 * i], v[4 * i + 1]));
    const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(v[4 * i + 2], v[4 * i + 3]),
                                   _mm512_unpackhi_ps(v[4 * i + 2], v[4 * i + 3]));
    s[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  }
  const __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(s[0], s[1], 0x88),
                                   _mm512_shuffle_f32x4(s[0], s[1], 0xdd));
  const __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(s[2], s[3], 0x88),
                                    _mm512_shuffle_f32x4(s[2], s[3], 0xdd));
  const __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88),
                                   _mm512_shuffle_f32x4(low, high, 0xdd));
  F r;
  memcpy(&r, &all, sizeof all);
  return r;
}

// Word j of row i becomes word i of row j.
MINISGL_LANE_FN void transpose(Pairs (&rows)[16]) {
  __m512i a[16], b[16];
  memcpy(a, rows, sizeof a);
  _Pragma("GCC unroll 8") for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  _Pragma("GCC unroll 4") for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
    b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
  }
  _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
    a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
    a[i + 4] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd);
  }
  memcpy(rows, a, sizeof a);
}
#endif

}  // namespace minisgl::cpu::MINISGL_SET
