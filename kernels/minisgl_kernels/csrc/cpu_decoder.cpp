// All layers of a dense decoder in one call, on a team of threads.
//
// The phases of a layer, with a barrier behind each: norm and QKV product; norm and rotation of
// heads, and store of keys and values; attention; O product, added to the residual; norm, product
// and gate of the MLP; its second product, added to the residual. What stands between operators is
// bf16, as in torch; each product is rounded once.
#include "cpu_paged.h"
#include "cpu_team.h"

#include <chrono>

namespace minisgl::cpu {

// These three are filled in Python: minisgl_kernels/cpu_decoder.py.
struct LayerWeights {
  Packed qkv, o, gate_up, down;
  const bf16 *input_norm, *post_norm;
  const bf16 *q_norm, *k_norm;  // [head_dim], or null
};

struct Model {
  int64_t layers, hidden, width, heads, kv_heads, head_dim;
  float eps;
  int32_t isa, threads;
  const LayerWeights* layer;
  Packed head;
  const bf16* embedding;  // [vocabulary, hidden]; null: the rows of the head
  const bf16* last_norm;
  const float* turns;  // by position [head_dim]: cosines, then sines
};

struct Step {
  int64_t tokens;
  Requests requests;
  const int64_t *ids, *positions, *slots;  // [tokens]
  bf16 *keys, *values;                     // of the first layer
  int64_t layer_stride;                    // elements from one layer's keys to the next one's
  float* logits;                           // [requests, vocabulary], `logits_stride` a row
  int64_t logits_stride;
  double* seconds;  // [kPhases], added to; or null
};

enum Phase { kEmbed, kQkv, kTurn, kAttend, kO, kGateUp, kDown, kHead, kPhases };

namespace {

// Up to so many rows each thread normalises for itself: it is cheaper than to wait for the others.
constexpr int64_t kOwnRows = 8;

constexpr int64_t rounded_up(int64_t n) { return (n + 31) / 32 * 32; }

class Clock {
 public:
  Clock(double* seconds, bool on) : seconds_(on ? seconds : nullptr) {
    if (seconds_ != nullptr) last_ = std::chrono::steady_clock::now();
  }
  void end(Phase phase) {
    if (seconds_ == nullptr) return;
    const auto now = std::chrono::steady_clock::now();
    seconds_[phase] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

 private:
  double* seconds_;
  std::chrono::steady_clock::time_point last_;
};

class Decoder {
 public:
  explicit Decoder(const Model& model)
      : model_(model), layers_(model.layer, model.layer + model.layers),
        kernels_(layer_kernels(static_cast<Isa>(model.isa))), team_(model.threads),
        attention_({model.heads, model.kv_heads, model.head_dim}, static_cast<Isa>(model.isa)),
        lanes_(std::max(1, model.threads)), own_(std::max(1, model.threads)) {
    for (Lane& lane : lanes_) lane.isa = static_cast<Isa>(model.isa);
    for (Scratch& own : own_) own.get(kOwnRows * hidden_stride() * sizeof(bf16));
  }

  bool step(const Step& step) {
    const int64_t rows = std::max(step.tokens, step.requests.count);
    h_ = get(h_memory_, rows * hidden_stride());
    x_ = get(x_memory_, rows * hidden_stride());
    qkv_ = get(qkv_memory_, step.tokens * qkv_stride());
    heads_ = get(heads_memory_, step.tokens * heads_stride());
    wide_ = get(wide_memory_, step.tokens * wide_stride());
    if (!attention_.plan(step.requests)) return false;
    // Whoever found too little memory later would leave the others at a barrier for ever.
    const int64_t bytes = std::max(attention_.scratch_bytes(), products_scratch(step));
    for (Lane& lane : lanes_) lane.scratch.get(bytes);
    team_.run([&](int thread, int threads) noexcept {
      Lane& lane = lanes_[thread];
      lane.thread = thread;
      lane.threads = threads;
      compute(step, lane);
    });
    return true;
  }

  // Calls work(argument, row) for each row, on all threads.
  void each_row(void (*work)(const void*, int64_t), const void* argument, int64_t rows) {
    std::atomic<int64_t> next{0};
    team_.run([&](int, int) {
      for (int64_t row; (row = next.fetch_add(1, std::memory_order_relaxed)) < rows;) {
        work(argument, row);
      }
    });
  }

 private:
  int64_t hidden_stride() const { return rounded_up(model_.hidden); }
  int64_t heads_stride() const { return rounded_up(model_.heads * model_.head_dim); }
  int64_t wide_stride() const { return rounded_up(model_.width); }
  int64_t qkv_stride() const {
    return rounded_up((model_.heads + 2 * model_.kv_heads) * model_.head_dim);
  }

  // Bytes that a thread needs for the largest of the products.
  int64_t products_scratch(const Step& step) const {
    const Isa isa = static_cast<Isa>(model_.isa);
    int64_t most = cut_of(model_.head, step.requests.count, isa).bytes();
    for (const LayerWeights& layer : layers_) {
      for (const Packed* w : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down}) {
        most = std::max(most, cut_of(*w, step.tokens, isa).bytes());
      }
    }
    return most;
  }

  static bf16* get(Scratch& memory, int64_t count) {
    return reinterpret_cast<bf16*>(memory.get(count * sizeof(bf16)));
  }

  void compute(const Step& step, Lane& lane) {
    Clock clock(step.seconds, lane.thread == 0 && step.seconds != nullptr);
    const int64_t m = step.tokens;
    embed(step, lane);
    clock.end(kEmbed);
    for (int64_t l = 0; l < model_.layers; ++l) {
      const LayerWeights& w = layers_[l];
      const Packed& next = l + 1 < model_.layers ? layers_[l + 1].qkv : model_.head;
      bf16* const keys = step.keys + l * step.layer_stride;
      bf16* const values = step.values + l * step.layer_stride;
      const bf16* x = normal(h_, w.input_norm, m, lane);
      matmul(w.qkv, x, hidden_stride(), m, {Then::store, qkv_, qkv_stride()}, lane, &w.o);
      team_.barrier();
      clock.end(kQkv);
      const PagedAttention::Claim claim = attention_.claim(keys, values, lane);
      turn(step, w, keys, values, lane);
      team_.barrier();
      clock.end(kTurn);
      attention_.compute(claim, qkv_, qkv_stride(), keys, values, heads_, heads_stride(), lane);
      team_.barrier();
      clock.end(kAttend);
      if (lane.thread == 0) attention_.restart();
      matmul(w.o, heads_, heads_stride(), m, {Then::add, h_, hidden_stride()}, lane, &w.gate_up);
      team_.barrier();
      clock.end(kO);
      x = normal(h_, w.post_norm, m, lane);
      matmul(w.gate_up, x, hidden_stride(), m, {Then::silu, wide_, wide_stride()}, lane, &w.down);
      team_.barrier();
      clock.end(kGateUp);
      matmul(w.down, wide_, wide_stride(), m, {Then::add, h_, hidden_stride()}, lane, &next);
      team_.barrier();
      clock.end(kDown);
    }
    const bf16* const last = last_rows(step, lane);
    const bf16* const x = normal(last, model_.last_norm, step.requests.count, lane);
    matmul(model_.head, x, hidden_stride(), step.requests.count,
           {Then::logits, step.logits, step.logits_stride}, lane);
    team_.barrier();
    clock.end(kHead);
  }

  void embed(const Step& step, const Lane& lane) {
    const Range mine = share(step.tokens, 1, lane);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      bf16* const to = h_ + i * hidden_stride();
      if (model_.embedding == nullptr) {
        unpack_row(model_.head, step.ids[i], to);
      } else {
        memcpy(to, model_.embedding + step.ids[i] * model_.hidden, model_.hidden * sizeof(bf16));
      }
    }
    team_.barrier();
  }

  // The norm of the rows of `from`, for this thread to read.
  const bf16* normal(const bf16* from, const bf16* weight, int64_t rows, Lane& lane) {
    const bool own = rows <= kOwnRows;
    bf16* const to = own ? get(own_[lane.thread], kOwnRows * hidden_stride()) : x_;
    const Range mine = own ? Range{0, rows} : share(rows, 1, lane);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      kernels_.rms_norm(from + i * hidden_stride(), weight, model_.eps, model_.hidden,
                        to + i * hidden_stride());
    }
    if (!own) team_.barrier();
    return to;
  }

  // Queries are turned where they are; keys and values go to the cache.
  void turn(const Step& step, const LayerWeights& w, bf16* keys, bf16* values, const Lane& lane) {
    const int64_t dim = model_.head_dim, q = model_.heads, kv = model_.kv_heads;
    const int64_t units = q + kv;  // a unit is a query head, or a KV head with its values
    const Range mine = share(step.tokens * units, 1, lane);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      const int64_t token = i / units, head = i % units;
      bf16* const from = qkv_ + token * qkv_stride() + head * dim;
      const float* const turns = model_.turns + step.positions[token] * dim;
      if (head < q) {
        kernels_.turn_head(from, w.q_norm, model_.eps, turns, dim, from);
        continue;
      }
      const int64_t at = (step.slots[token] * kv + head - q) * dim;
      kernels_.turn_head(from, w.k_norm, model_.eps, turns, dim, keys + at);
      memcpy(values + at, from + kv * dim, dim * sizeof(bf16));
    }
  }

  // The residual of each request's last token, in order. All threads see it when this returns.
  const bf16* last_rows(const Step& step, const Lane& lane) {
    const Requests& requests = step.requests;
    if (step.tokens == requests.count) return h_;
    if (lane.thread == 0) {  // in place: no row goes further up than to where it is
      int64_t token = 0;
      for (int64_t r = 0; r < requests.count; ++r) {
        token += requests.after[r] - requests.before[r];
        memmove(h_ + r * hidden_stride(), h_ + (token - 1) * hidden_stride(),
                model_.hidden * sizeof(bf16));
      }
    }
    team_.barrier();
    return h_;
  }

  const Model model_;
  const std::vector<LayerWeights> layers_;
  const LayerKernels& kernels_;
  Team team_;
  PagedAttention attention_;
  std::vector<Lane> lanes_;
  std::vector<Scratch> own_;
  Scratch h_memory_, x_memory_, qkv_memory_, heads_memory_, wide_memory_;
  bf16 *h_ = nullptr, *x_ = nullptr, *qkv_ = nullptr, *heads_ = nullptr, *wide_ = nullptr;
};

// Attention alone, for steps whose other operators are torch's.
class Attention {
 public:
  Attention(Heads heads, Isa isa, int threads)
      : team_(threads), attention_(heads, isa), lanes_(std::max(1, threads)) {
    for (Lane& lane : lanes_) lane.isa = isa;
  }

  bool plan(const Requests& requests) {
    for (Lane& lane : lanes_) lane.scratch.get(attention_.scratch_bytes());  // as in a step
    return attention_.plan(requests);
  }

  void compute(const bf16* q, int64_t q_stride, const bf16* keys, const bf16* values, bf16* out,
               int64_t out_stride) {
    attention_.restart();
    team_.run([&](int thread, int threads) {
      Lane& lane = lanes_[thread];
      lane.thread = thread;
      lane.threads = threads;
      attention_.compute(attention_.claim(keys, values, lane), q, q_stride, keys, values, out,
                         out_stride, lane);
    });
  }

 private:
  Team team_;
  PagedAttention attention_;
  std::vector<Lane> lanes_;
};

enum Result { kDone = 0, kNoMemory = 1, kBadLengths = 2 };

// An exception must not leave a C function.
template <class F>
int guarded(F&& work) {
  try {
    return work() ? kDone : kBadLengths;
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

}  // namespace
}  // namespace minisgl::cpu

using namespace minisgl::cpu;

extern "C" {

// Null where there is too little memory.
void* cpu_decoder_create(const Model* model) {
  try {
    return new Decoder(*model);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void cpu_decoder_destroy(void* decoder) { delete static_cast<Decoder*>(decoder); }

int cpu_decoder_step(void* decoder, const Step* step) {
  return guarded([&] { return static_cast<Decoder*>(decoder)->step(*step); });
}

void cpu_decoder_each_row(void* decoder, void (*work)(const void*, int64_t), const void* argument,
                          int64_t rows) {
  static_cast<Decoder*>(decoder)->each_row(work, argument, rows);
}

void* cpu_attention_create(int64_t heads, int64_t kv_heads, int64_t dim, int32_t isa,
                           int32_t threads) {
  try {
    return new Attention({heads, kv_heads, dim}, static_cast<Isa>(isa), threads);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void cpu_attention_destroy(void* attention) { delete static_cast<Attention*>(attention); }

int cpu_attention_plan(void* attention, const Requests* requests) {
  return guarded([&] { return static_cast<Attention*>(attention)->plan(*requests); });
}

void cpu_attention_compute(void* attention, const void* q, int64_t q_stride, const void* keys,
                           const void* values, void* out, int64_t out_stride) {
  static_cast<Attention*>(attention)->compute(
      static_cast<const bf16*>(q), q_stride, static_cast<const bf16*>(keys),
      static_cast<const bf16*>(values), static_cast<bf16*>(out), out_stride);
}

}  // extern "C"
