// The length of the common prefix of two arrays of token ids.
#pragma once

#include <cstdint>

namespace minisgl {

// Blocks are compared without a branch inside, so that the compiler makes vector code of it for
// any instruction set; only the block that differs is walked. Reads a[0, n) and b[0, n) alone.
inline std::int64_t common_prefix_len(const std::int32_t* a, const std::int32_t* b,
                                      std::int64_t n) {
  constexpr std::int64_t block = 32;
  std::int64_t i = 0;
  for (; i + block <= n; i += block) {
    std::int32_t differs = 0;
    for (std::int64_t j = 0; j < block; ++j) differs |= a[i + j] ^ b[i + j];
    if (differs) break;
  }
  while (i < n && a[i] == b[i]) ++i;
  return i;
}

}  // namespace minisgl
