// Steps of small decoders whose arrays are just as large as they must be, for the sanitizers. Each
// step is tried with every one of its allocations failing before it may succeed.
#include <stdio.h>
#include <stdlib.h>

#include <array>
#include <atomic>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>

namespace {

std::atomic<int64_t> allocations_left{INT64_MAX};

void* limited_alloc(size_t alignment, size_t bytes) {
  return allocations_left.fetch_sub(1) > 0 ? aligned_alloc(alignment, bytes) : nullptr;
}

}  // namespace

#define aligned_alloc limited_alloc
#include "cpu_decoder.cpp"

namespace {

std::mt19937 random_bits(7);

std::vector<bf16> numbers(int64_t count, float scale) {
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<bf16> made(count);
  for (bf16& value : made) value = to_bf16(normal(random_bits));
  return made;
}

// A packed weight and its memory, aligned as it must be and no larger.
struct Weight {
  Packed packed;
  std::unique_ptr<char, void (*)(void*)> memory{nullptr, free};
  std::vector<float> scale;

  Weight(int64_t outputs, int64_t inputs, Stored stored, bool gated) {
    const std::vector<bf16> rows = numbers(outputs * inputs, 0.1f);
    const int64_t blocks = blocks_of(outputs, gated), bytes = blocks * block_bytes(inputs, stored);
    memory.reset(static_cast<char*>(aligned_alloc(64, (bytes + 63) / 64 * 64)));
    packed = {memory.get(), nullptr, nullptr, outputs, inputs, stored, gated};
    if (stored == Stored::bf16) {
      pack_bf16(rows.data(), outputs, inputs, gated, reinterpret_cast<bf16*>(memory.get()));
      return;
    }
    scale.resize(blocks * kBlock);
    packed.scale = scale.data();
    pack_int8(rows.data(), outputs, inputs, gated, reinterpret_cast<uint8_t*>(memory.get()),
              scale.data());
  }
};

// The logits of some steps, all added up.
double run(Isa isa, int threads, Stored stored, int64_t dim, int64_t kv_heads, int64_t group,
           int64_t hidden, int64_t width) {
  random_bits.seed(7);
  const int64_t heads = kv_heads * group, layers = 2, vocabulary = 269, slots = 400;
  std::vector<Weight> weights;
  std::vector<LayerWeights> of_layers;
  const std::vector<bf16> norms = numbers(std::max(hidden, dim) + 1, 1.0f);
  for (int64_t l = 0; l < layers; ++l) {
    weights.emplace_back((heads + 2 * kv_heads) * dim, hidden, stored, false);
    weights.emplace_back(hidden, heads * dim, stored, false);
    weights.emplace_back(2 * width, hidden, stored, true);
    weights.emplace_back(hidden, width, stored, false);
    const bf16* const norm = norms.data() + 1;  // aligned to two bytes alone
    of_layers.push_back({weights[4 * l].packed, weights[4 * l + 1].packed,
                         weights[4 * l + 2].packed, weights[4 * l + 3].packed, norm, norm,
                         l == 0 ? norm : nullptr, l == 0 ? norm : nullptr});
  }
  const Weight head(vocabulary, hidden, stored, false);
  std::vector<float> turns(slots * dim, 0.7f);
  const Model model{layers, hidden, width, heads, kv_heads, dim, 1e-5f,
                    static_cast<int32_t>(isa), threads, of_layers.data(), head.packed, nullptr,
                    norms.data() + 1, turns.data()};
  void* const decoder = cpu_decoder_create(&model);
  const int64_t layer = slots * kv_heads * dim;
  std::vector<bf16> keys = numbers(layers * layer + 1, 1.0f), values = keys;
  std::vector<int32_t> table(3 * slots);
  for (int64_t row = 0; row < 3; ++row) {
    for (int64_t i = 0; i < slots; ++i) table[row * slots + i] = (slots - 1 - i + row * 130) % slots;
  }
  double total = 0;
  const std::vector<std::vector<std::pair<int, int>>> steps = {
      {{0, 1}}, {{1, 34}}, {{35, 36}}, {{0, 70}, {36, 37}, {0, 1}}, {{129, 130}, {69, 70}, {2, 3}},
      {{0, 128}}};
  for (const auto& step : steps) {
    std::vector<int64_t> rows, ids, positions, places;
    std::vector<int32_t> before, after;
    for (const auto& [first, last] : step) {
      rows.push_back(2 - static_cast<int64_t>(rows.size()));
      before.push_back(first);
      after.push_back(last);
      for (int i = first; i < last; ++i) {
        ids.push_back((i * 37) % vocabulary);
        positions.push_back(i);
        places.push_back(table[rows.back() * slots + i]);
      }
    }
    std::vector<float> logits(rows.size() * vocabulary);
    const Step given{static_cast<int64_t>(ids.size()),
                     {static_cast<int64_t>(rows.size()), rows.data(), before.data(), after.data(),
                      table.data(), slots},
                     ids.data(), positions.data(), places.data(), keys.data() + 1,
                     values.data() + 1, layer, logits.data(), vocabulary, nullptr};
    int result = kNoMemory;
    for (int64_t enough = 0; result == kNoMemory && enough < 100; ++enough) {
      allocations_left = enough;
      result = cpu_decoder_step(decoder, &given);
    }
    allocations_left = INT64_MAX;
    if (result != kDone) return NAN;
    total = std::accumulate(logits.begin(), logits.end(), total);
  }
  cpu_decoder_destroy(decoder);
  return total;
}

}  // namespace

int main() {
  for (int isa = 0; isa <= static_cast<int>(best_isa()); ++isa) {
    for (const Stored stored : {Stored::bf16, Stored::int8}) {
      for (const auto& [dim, kv_heads, group, hidden, width] :
           std::vector<std::array<int64_t, 5>>{{{64, 3, 3, 108, 200}}, {{16, 1, 8, 96, 33}},
                                               {{80, 2, 1, 50, 64}}}) {
        double first = 0;
        for (const int threads : {1, 3}) {
          const double sum =
              run(static_cast<Isa>(isa), threads, stored, dim, kv_heads, group, hidden, width);
          if (threads == 1) first = sum;
          if (!std::isfinite(sum) || sum != first) {
            fprintf(stderr, "isa %d, dim %d, threads %d: %g is not %g\n", isa,
                    static_cast<int>(dim), threads, sum, first);
            return 1;
          }
        }
      }
    }
  }
  return 0;
}
