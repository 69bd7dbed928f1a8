// Rows of an embedding table, zeros for ids of other ranks. One warp a token.
#include "common.cuh"

using namespace minisgl;

namespace {

constexpr int kWarps = 4;

template <class Piece, class Id>
__global__ void embedding(Piece* out, const Id* ids, const Piece* table, int64_t tokens,
                          int64_t start, int64_t count) {
  constexpr int kPieces = ROW_BYTES / sizeof(Piece);
  const int64_t token = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  wait_for_previous();
  launch_next();
  if (token >= tokens) return;
  const int64_t local = static_cast<int64_t>(ids[token]) - start;
  const bool mine = local >= 0 && local < count;
  const Piece* from = table + (mine ? local : 0) * kPieces;
  Piece* to = out + token * kPieces;
#pragma unroll 8
  for (int i = threadIdx.x % 32; i < kPieces; i += 32) to[i] = mine ? from[i] : Piece{};
}

template <class Id>
int run(Args args) {
  const int64_t tokens = args.size(0, 0);
  const uint64_t all = ROW_BYTES | address(args.data<void>(0)) | address(args.data<void>(2));
  const auto go = [&](auto piece) {
    using Piece = decltype(piece);
    return launch(embedding<Piece, Id>, (tokens + kWarps - 1) / kWarps, 32 * kWarps, 0,
                  args.stream(), args.data<Piece>(0), args.data<const Id>(1),
                  args.data<const Piece>(2), tokens, args.integer(3), args.integer(4));
  };
  return with_access(all, go);
}

}  // namespace

// (out [T, H], ids [T], table [V, H], start, count)
EXPORT(embedding) { return args.wide(1) ? run<int64_t>(args) : run<int32_t>(args); }
