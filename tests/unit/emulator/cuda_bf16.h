#pragma once
#include <stdint.h>
#include <string.h>

struct __nv_bfloat16 {
  uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

inline __nv_bfloat16 __float2bfloat16(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if (f != f) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
