#pragma once
#include "cuda_runtime.h"

struct __half {
  _Float16 value;
};

inline float __half2float(__half x) { return static_cast<float>(x.value); }
inline __half __float2half(float f) { return {static_cast<_Float16>(f)}; }

struct alignas(4) __half2 {
  __half x, y;
};

inline float2 __half22float2(__half2 v) { return {__half2float(v.x), __half2float(v.y)}; }

inline __half2 __floats2half2_rn(float x, float y) { return {__float2half(x), __float2half(y)}; }

inline __half2 __hmul2(__half2 a, __half2 b) {
  const float2 x = __half22float2(a), y = __half22float2(b);
  return __floats2half2_rn(x.x * y.x, x.y * y.y);
}
