// The C functions of cpu_matmul.h, for packing at load and for tests.
#include "cpu_matmul.h"

using namespace minisgl::cpu;

extern "C" {

int32_t cpu_best_isa() { return static_cast<int32_t>(best_isa()); }

int64_t cpu_packed_blocks(int64_t outputs, int32_t gated) { return blocks_of(outputs, gated); }

int64_t cpu_block_bytes(int64_t inputs, int32_t stored) {
  return block_bytes(inputs, static_cast<Stored>(stored));
}

void cpu_pack_bf16(const void* weight, int64_t outputs, int64_t inputs, int32_t gated, void* data) {
  pack_bf16(static_cast<const bf16*>(weight), outputs, inputs, gated, static_cast<bf16*>(data));
}

void cpu_pack_int8(const void* weight, int64_t outputs, int64_t inputs, int32_t gated, void* data,
                   float* scale) {
  pack_int8(static_cast<const bf16*>(weight), outputs, inputs, gated, static_cast<uint8_t*>(data),
            scale);
}

void cpu_unpack_rows(const Packed* w, const int64_t* rows, int64_t count, void* out) {
  for (int64_t i = 0; i < count; ++i) {
    unpack_row(*w, rows[i], static_cast<bf16*>(out) + i * w->inputs);
  }
}

// One thread's part of a product, as if `threads` computed it.
void cpu_matmul(const Packed* w, const void* x, int64_t ldx, int64_t m, int32_t then, void* out,
                int64_t ldo, int32_t isa, int32_t thread, int32_t threads) {
  Lane lane;
  lane.thread = thread;
  lane.threads = threads;
  lane.isa = static_cast<Isa>(isa);
  matmul(*w, static_cast<const bf16*>(x), ldx, m, {static_cast<Then>(then), out, ldo}, lane);
}

}  // extern "C"
