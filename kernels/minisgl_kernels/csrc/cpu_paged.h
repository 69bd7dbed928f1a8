// The attention of one step, shared out among threads.
//
// A request with one new token is a decode: its keys are cut into parts, which depend on its length
// alone, and whoever computes the last part of a KV head puts the parts together, in their order. A
// request with more new tokens is cut into blocks of queries.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "cpu_layer.h"
#include "cpu_matmul.h"

namespace minisgl::cpu {

struct Heads {
  int64_t heads, kv_heads, dim;
  int group() const { return static_cast<int>(heads / kv_heads); }
};

// The requests of a step: their rows of the page table, and lengths before and after the step.
struct Requests {
  int64_t count;
  const int64_t* rows;
  const int32_t *before, *after;
  const int32_t* page_table;  // slots by position, `columns` a row
  int64_t columns;
};

class PagedAttention {
 public:
  PagedAttention(Heads heads, Isa isa)
      : heads_(heads), kernels_(layer_kernels(isa)),
        scale_(static_cast<float>(1.4426950408889634 / sqrt(static_cast<double>(heads.dim)))) {}

  // Once a step, on one thread. False where a request has no new token.
  bool plan(const Requests& requests) {
    requests_ = requests;
    items_.clear();
    int64_t token = 0, floats = 0;
    for (int64_t r = 0; r < requests.count; ++r) {
      const int64_t length = requests.after[r], news = length - requests.before[r];
      if (news < 1 || requests.before[r] < 0) return false;
      const int queries = block_queries();
      for (int64_t at = 0; news > 1 && at < news; at += queries) {
        const int count = static_cast<int>(std::min<int64_t>(queries, news - at));
        for (int64_t head = 0; head < heads_.kv_heads; ++head) {
          items_.push_back({r, head, token + at, requests.before[r] + at, count, 0, 0});
        }
      }
      token += news;
    }
    // Long blocks first, so that no thread begins one when the others are done.
    std::sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) {
      return a.first + a.count > b.first + b.count;
    });
    token = 0;
    for (int64_t r = 0; r < requests.count; ++r) {
      const int64_t length = requests.after[r], news = length - requests.before[r];
      if (news == 1) {
        const int64_t size = part_keys(length), parts = (length + size - 1) / size;
        for (int64_t p = 0; p < parts; ++p) {
          const int64_t count = std::min(size, length - p * size);
          for (int64_t head = 0; head < heads_.kv_heads; ++head) {  // of the same slots
            items_.push_back({r, head, token, p * size, static_cast<int>(count),
                              static_cast<int>(parts), floats + head * parts * part_floats()});
          }
        }
        floats += heads_.kv_heads * parts * part_floats();
      }
      token += news;
    }
    parts_ = reinterpret_cast<float*>(memory_.get(floats * sizeof(float) + 64));
    const int64_t counters = requests.count * heads_.kv_heads;
    if (counters > counters_) {
      done_ = std::make_unique<std::atomic<int>[]>(counters);
      counters_ = counters;
      for (int64_t i = 0; i < counters; ++i) done_[i].store(0, std::memory_order_relaxed);
    }
    restart();
    return true;
  }

  // Bytes that a thread needs for its part of any step.
  int64_t scratch_bytes() const {
    return std::max(part_scratch(heads_.group()), block_scratch(block_queries()));
  }

  // Before each layer, on one thread, with barriers around it.
  void restart() { next_.store(0, std::memory_order_relaxed); }

  // What a thread has taken of the work, and not done yet.
  struct Claim {
    int64_t at, end;
  };

  // A thread's first share of a layer, after `restart`. What it will read is fetched already.
  Claim claim(const bf16* keys, const bf16* values, const Lane& lane) {
    Claim claim = take(lane);
    ahead(claim, keys, values).fetch(kLeastKeys);
    return claim;
  }

  // The rest of one thread's part of a layer: q and out are [tokens, heads, dim] with rows
  // `q_stride` and `out_stride` apart, keys and values [slots, kv_heads, dim].
  void compute(Claim claim, const bf16* q, int64_t q_stride, const bf16* keys, const bf16* values,
               bf16* out, int64_t out_stride, Lane& lane) {
    while (claim.at < claim.end) {
      const Item& item = items_[claim.at];
      if (++claim.at == claim.end) claim = take(lane);  // early, to know what comes next
      const int64_t at = item.kv_head * heads_.dim, heads_at = at * heads_.group();
      const bf16* const mine = q + item.token * q_stride + heads_at;
      bf16* const to = out + item.token * out_stride + heads_at;
      if (item.parts > 0) {
        part(item, mine, keys + at, values + at, to, ahead(claim, keys, values), lane);
      } else {
        block(item, mine, q_stride, keys + at, values + at, to, out_stride, lane);
      }
    }
  }

 private:
  static constexpr int64_t kLeastKeys = 64;  // of a part

  // Part p of a decode, or a block of queries (then there are no parts).
  struct Item {
    int64_t request, kv_head, token;
    int64_t first;  // key of the part, or position of the first query
    int count, parts;
    int64_t place;  // of the request's and head's parts among the floats
  };

  static int64_t part_keys(int64_t length) {
    return (length + kLeastKeys * kMostParts - 1) / (kLeastKeys * kMostParts) * kLeastKeys;
  }

  Claim take(const Lane& lane) {
    const int64_t total = static_cast<int64_t>(items_.size());
    const int64_t grab = std::max<int64_t>(1, total / (lane.threads * 16));
    const int64_t begin = next_.fetch_add(grab, std::memory_order_relaxed);
    return {std::min(begin, total), std::min(begin + grab, total)};
  }

  // The keys and values of what is claimed next, if it is a decode.
  Ahead ahead(const Claim& claim, const bf16* keys, const bf16* values) const {
    if (claim.at == claim.end || items_[claim.at].parts == 0) return {};
    const Item& item = items_[claim.at];
    const int64_t at = item.kv_head * heads_.dim;
    return {keys + at, values + at, heads_.kv_heads * heads_.dim, slots(item) + item.first,
            item.count, heads_.dim * static_cast<int64_t>(sizeof(bf16))};
  }

  int64_t part_floats() const { return heads_.group() * (heads_.dim + 2); }
  int block_queries() const { return std::max(1, kBlockRows / heads_.group()); }
  int64_t block_scratch(int queries) const {
    const int rows = queries * heads_.group();
    return PrefillScratch(nullptr, rows, static_cast<int>(heads_.dim)).bytes;
  }

  const int32_t* slots(const Item& item) const {
    return requests_.page_table + requests_.rows[item.request] * requests_.columns;
  }

  void part(const Item& item, const bf16* q, const bf16* keys, const bf16* values, bf16* out,
            Ahead ahead, Lane& lane) {
    const int group = heads_.group(), dim = static_cast<int>(heads_.dim);
    float* const all = parts_ + item.place;
    float* const mine = all + item.first / part_keys(requests_.after[item.request]) * part_floats();
    kernels_.attend_part(q, group, keys, values, heads_.kv_heads * heads_.dim,
                         slots(item) + item.first, item.count, dim, scale_, ahead,
                         lane.scratch.get(part_scratch(group)), mine, mine + group * dim,
                         mine + group * (dim + 1));
    std::atomic<int>& done = done_[item.request * heads_.kv_heads + item.kv_head];
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < item.parts) return;
    done.store(0, std::memory_order_relaxed);
    kernels_.merge_parts(all, part_floats(), item.parts, group, dim, out);
  }

  void block(const Item& item, const bf16* q, int64_t q_stride, const bf16* keys,
             const bf16* values, bf16* out, int64_t out_stride, Lane& lane) {
    const int group = heads_.group(), dim = static_cast<int>(heads_.dim);
    kernels_.attend_block(q, q_stride, group, keys, values, heads_.kv_heads * heads_.dim,
                          slots(item), item.first, item.count, dim, scale_,
                          lane.scratch.get(block_scratch(item.count)), out, out_stride);
  }

  const Heads heads_;
  const LayerKernels& kernels_;
  const float scale_;
  Requests requests_{};
  std::vector<Item> items_;
  alignas(64) std::atomic<int64_t> next_{0};
  Scratch memory_;
  float* parts_ = nullptr;
  std::unique_ptr<std::atomic<int>[]> done_;
  int64_t counters_ = 0;
};

}  // namespace minisgl::cpu
