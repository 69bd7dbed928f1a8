// top_k, top_p and min_p of a row on a CPU as one bound, by minisgl/engine/filters.py.
//
// There is no sort of the vocabulary. Few tokens are so likely that they may be at the border: only
// those that are not too far below the largest are looked at, and the others when these do not
// suffice. A histogram, coarse in y, tells in which bin the last token that passes stands, and this
// bin alone is sorted.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace minisgl {

class FilterBounds {
 public:
  // Of logits [size] whose largest is `largest`. top_k is at least 1, and `size` or more for no
  // limit; top_p is 1 for none. Returns the y of the last token that passes and its id: of the
  // tokens with just this y those with a larger id do not.
  void find(const float* logits, std::int64_t size, float largest, float temperature,
            std::int64_t top_k, double top_p, float* least, std::int64_t* last) {
    prepare(logits, size, largest, temperature);
    Place place{-std::numeric_limits<float>::infinity(), size};
    double total = total_;
    if (top_k < size) place = select(static_cast<double>(top_k), true, &total);
    if (top_p < 1) {
      const Place other = select(top_p * total, false, nullptr);
      if (other.y > place.y || (other.y == place.y && other.id < place.id)) place = other;
    }
    *least = place.y;
    *last = place.id;
  }

 private:
  static constexpr int kGroup = 16;
  static constexpr int kBins = 2048;  // 64 for each unit of y; the last one has all beyond

  struct Place {
    float y;
    std::int64_t id;
  };

  using Floats = float __attribute__((vector_size(64)));
  using Half = float __attribute__((vector_size(32)));
  using Quarter = float __attribute__((vector_size(16)));
  using Words = std::uint32_t __attribute__((vector_size(64)));
  using Doubles = double __attribute__((vector_size(64)));

  // e^y for y of at most 0: 1 for 0, and within 2e-7 of it elsewhere; 0 below -87.
  static inline __attribute__((always_inline)) Floats exp_of(Floats y) {
    const Floats big = y * 1.44269504f + 12582912.0f, n = big - 12582912.0f;
    const Floats rest = (y - n * 0.693359375f) + n * 2.12194440e-4f;
    Floats p = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * rest + 8.3334519073e-3f;
    p = p * rest + 4.1665795894e-2f;
    p = p * rest + 1.6666665459e-1f;
    p = p * rest + 5.0000001201e-1f;
    p = p * rest * rest + rest + 1.0f;
    const Words power = reinterpret_cast<Words>(p) + (reinterpret_cast<Words>(big) << 23);
    return reinterpret_cast<Floats>(power & reinterpret_cast<Words>(y > -87.0f));
  }

  void prepare(const float* logits, std::int64_t size, float largest, float temperature) {
    const std::int64_t padded = (size + kGroup - 1) / kGroup * kGroup;
    y_.resize(padded);
    mass_.resize(padded);
    tops_.resize(padded / kGroup);
    Doubles sums[2] = {};
    for (std::int64_t g = 0; g < padded; g += kGroup) {
      float some[kGroup];
      const std::int64_t count = std::min<std::int64_t>(kGroup, size - g);
      std::fill(some + count, some + kGroup, -std::numeric_limits<float>::infinity());
      std::memcpy(some, logits + g, count * sizeof(float));
      Floats y;
      std::memcpy(&y, some, sizeof y);
      y = (y - largest) / temperature;
      const Floats mass = exp_of(y);
      std::memcpy(&y_[g], &y, sizeof y);
      std::memcpy(&mass_[g], &mass, sizeof mass);
      Half halves[2];
      std::memcpy(halves, &mass, sizeof mass);
      sums[0] += __builtin_convertvector(halves[0], Doubles);
      sums[1] += __builtin_convertvector(halves[1], Doubles);
      std::memcpy(halves, &y, sizeof y);
      const Half top = halves[0] > halves[1] ? halves[0] : halves[1];
      Quarter quarters[2];
      std::memcpy(quarters, &top, sizeof top);
      const Quarter last = quarters[0] > quarters[1] ? quarters[0] : quarters[1];
      tops_[g / kGroup] = std::max(std::max(last[0], last[1]), std::max(last[2], last[3]));
    }
    total_ = 0;
    for (int i = 0; i < 8; ++i) total_ += sums[0][i] + sums[1][i];
    size_ = size;
    fill(kLook);
  }

  static int bin_of(float y) { return static_cast<int>(std::min(y * -64.0f, kBins - 1.0f)); }

  // Calls with (id, bin) of each token with y of at least `from`.
  template <class F>
  void each(float from, F&& f) const {
    for (std::size_t g = 0; g < tops_.size(); ++g) {
      if (!(tops_[g] >= from)) continue;
      const std::int64_t end = std::min<std::int64_t>(size_, (g + 1) * kGroup);
      for (std::int64_t i = g * kGroup; i < end; ++i) {
        if (y_[i] >= from) f(i, bin_of(y_[i]));
      }
    }
  }

  // The histogram of tokens with y of at least `from`, a border of bins or all.
  void fill(float from) {
    from_ = from;
    counts_.assign(kBins, 0);
    masses_.assign(kBins, 0.0);
    each(from, [this](std::int64_t i, int bin) {
      ++counts_[bin];
      masses_[bin] += mass_[i];
    });
  }

  // The token at which the count, or the mass, of those in order reaches `wanted`; else the last
  // one. `mass`: that of all up to it.
  Place select(double wanted, bool by_count, double* mass) {
    for (;;) {
      double before = 0, mass_before = 0;
      int bin = 0, last = 0;
      bool reached = false;
      for (; bin < kBins; ++bin) {
        if (counts_[bin] == 0) continue;
        const double more = by_count ? counts_[bin] : masses_[bin];
        last = bin;
        if ((reached = before + more >= wanted)) break;
        if (bin == kBins - 1) break;
        before += more;
        mass_before += masses_[bin];
      }
      const bool everything = from_ == -std::numeric_limits<float>::infinity();
      if (!reached && !everything) {
        fill(-std::numeric_limits<float>::infinity());
        continue;
      }
      if (!reached && last != kBins - 1) {  // rounding: all pass
        before -= by_count ? counts_[last] : masses_[last];
        mass_before -= masses_[last];
      }
      return within(last, wanted, by_count, before, mass_before, mass);
    }
  }

  Place within(int bin, double wanted, bool by_count, double before, double mass_before,
               double* mass) {
    inside_.clear();
    const float from = bin == kBins - 1 ? -std::numeric_limits<float>::infinity()
                                        : static_cast<float>(bin + 1) / -64.0f;
    each(from, [&](std::int64_t i, int its) {
      if (its == bin) inside_.push_back({y_[i], i});
    });
    std::sort(inside_.begin(), inside_.end(), [](const Place& a, const Place& b) {
      return a.y > b.y || (a.y == b.y && a.id < b.id);
    });
    Place place{-std::numeric_limits<float>::infinity(), size_};  // of a row without numbers
    for (const Place& one : inside_) {
      place = one;
      mass_before += mass_[one.id];
      before += by_count ? 1.0 : mass_[one.id];
      if (before >= wanted) break;
    }
    if (mass != nullptr) *mass = mass_before;
    return place;
  }

  static constexpr float kLook = -8.0f;

  std::vector<float> y_, mass_, tops_;
  std::vector<std::int64_t> counts_;
  std::vector<double> masses_;
  std::vector<Place> inside_;
  double total_ = 0;
  float from_ = 0;
  std::int64_t size_ = 0;
};

}  // namespace minisgl
