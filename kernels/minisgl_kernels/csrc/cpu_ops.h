// What stands between the products of a layer: norms, rotation of heads, and their way to the cache.
//
// Included once for each instruction set, behind cpu_lanes.h.

namespace minisgl::cpu::MINISGL_SET {

// out = x / rms(x) * weight, all [size].
MINISGL_TARGET inline void rms_norm(const bf16* x, const bf16* weight, float eps, int64_t size,
                                    bf16* out) {
  F squares[2] = {splat(0.0f), splat(0.0f)};
  const int64_t whole = size / 16 * 16;
  for (int64_t i = 0; i < whole; i += 16) {
    const F v = load_bf16(x + i);
    squares[i / 16 % 2] = squares[i / 16 % 2] + v * v;
  }
  float sum = sum_of(squares[0] + squares[1]);
  for (int64_t i = whole; i < size; ++i) sum += to_float(x[i]) * to_float(x[i]);
  const float factor = 1.0f / sqrtf(sum / static_cast<float>(size) + eps);
  for (int64_t i = 0; i < whole; i += 16) {
    store_bf16(out + i, load_bf16(x + i) * splat(factor) * load_bf16(weight + i));
  }
  for (int64_t i = whole; i < size; ++i) {
    out[i] = to_bf16(to_float(x[i]) * factor * to_float(weight[i]));
  }
}

// Dimension i turns with dimension i + dim / 2: by the cosines at `turn`, and the sines behind them.
MINISGL_TARGET inline void rotate(const bf16* x, const float* turn, int64_t dim, bf16* out) {
  const int64_t half = dim / 2, whole = half / 16 * 16;
  for (int64_t i = 0; i < whole; i += 16) {
    const F a = load_bf16(x + i), b = load_bf16(x + half + i);
    const F c = load(turn + i), s = load(turn + half + i);
    store_bf16(out + i, a * c - b * s);
    store_bf16(out + half + i, b * c + a * s);
  }
  for (int64_t i = whole; i < half; ++i) {
    const float a = to_float(x[i]), b = to_float(x[half + i]);
    out[i] = to_bf16(a * turn[i] - b * turn[half + i]);
    out[half + i] = to_bf16(b * turn[i] + a * turn[half + i]);
  }
}

// The query or key head at `x` [dim], normalised if there is a weight, then turned, to `out`, which
// may be `x`.
MINISGL_TARGET inline void turn_head(const bf16* x, const bf16* norm, float eps, const float* turn,
                                     int64_t dim, bf16* out) {
  if (norm != nullptr) {
    rms_norm(x, norm, eps, dim, out);
    x = out;
  }
  rotate(x, turn, dim, out);
}

}  // namespace minisgl::cpu::MINISGL_SET
