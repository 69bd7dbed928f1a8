// Keys and values of new tokens to their slots. One warp a token, for both.
#include "common.cuh"

using namespace minisgl;

namespace {

constexpr int kWarps = 4;

template <class Piece, class Slot>
__global__ void store_kv(const char* k, const char* v, char* k_slots, char* v_slots,
                         const Slot* out_loc, int64_t tokens, int64_t k_step, int64_t v_step,
                         int64_t slot_step) {
  constexpr int kPieces = ROW_BYTES / sizeof(Piece);
  const int64_t token = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  wait_for_previous();
  launch_next();
  if (token >= tokens) return;
  const int64_t slot = out_loc[token];
  if (slot < 0) return;
  const auto* k_from = reinterpret_cast<const Piece*>(k + token * k_step);
  const auto* v_from = reinterpret_cast<const Piece*>(v + token * v_step);
  auto* k_to = reinterpret_cast<Piece*>(k_slots + slot * slot_step);
  auto* v_to = reinterpret_cast<Piece*>(v_slots + slot * slot_step);
#pragma unroll 4
  for (int i = threadIdx.x % 32; i < kPieces; i += 32) {
    const Piece key = k_from[i], value = v_from[i];
    k_to[i] = key;
    v_to[i] = value;
  }
}

template <class Slot>
int run(Args args) {
  const int64_t tokens = args.size(0, 0), item = args.tensor(0)->dtype.bits / 8;
  const int64_t k_step = args.stride(0, 0) * item, v_step = args.stride(1, 0) * item;
  const int64_t slot_step = args.stride(2, 0) * item;
  uint64_t all = ROW_BYTES | k_step | v_step | slot_step;
  for (int i = 0; i < 4; ++i) all |= address(args.data<void>(i));
  const auto go = [&](auto piece) {
    return launch(store_kv<decltype(piece), Slot>, (tokens + kWarps - 1) / kWarps, 32 * kWarps, 0,
                  args.stream(), args.data<const char>(0), args.data<const char>(1),
                  args.data<char>(2), args.data<char>(3), args.data<const Slot>(4), tokens, k_step,
                  v_step, slot_step);
  };
  return with_access(all, go);
}

}  // namespace

// (k [T, heads, dim], v, k_slots [slots, heads, dim], v_slots, out_loc [T]); tokens and slots may
// be strided, and both slot tensors are so in the same way
EXPORT(store_kv) { return args.wide(4) ? run<int64_t>(args) : run<int32_t>(args); }
