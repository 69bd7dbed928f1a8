// Tiles of keys and values on their way to shared memory, some ahead of a warp's products.
//
// BOXES: the tensor memory accelerator copies a tile with one instruction for its keys and one for
// its values; a tile's slots then follow each other, as they do in pages of 16 tokens or more. Else
// lanes copy 16 bytes each, and any slots will do.
//
// Include hopper.cuh before this with BOXES, or tensor_core.cuh.
#pragma once

#include "decode_plan.cuh"

namespace minisgl {

constexpr int kRowBytes = HEAD_DIM * 2;        // one head of one token
constexpr int kPieces = kRowBytes / 16;        // of 16 bytes
constexpr int kParts = HEAD_DIM / 64;          // of a tile, with 64 dims of each row
constexpr int kPartBytes = kTile * 128;
constexpr int kTileBytes = kParts * kPartBytes;
constexpr int kStageBytes = 2 * kTileBytes;    // keys, then values
constexpr int kRingBytes = STAGES * kStageBytes;
constexpr int kRingAlign = BOXES ? 1024 : 16;  // swizzles go by the address
constexpr int kBarrierBytes = BOXES ? 8 * STAGES : 0;

// Where 16 bytes of a row stand in a tile: `piece` of the eight of a part. Eight rows of one piece
// lie in different banks.
__device__ inline uint32_t in_tile(int row, int part, int piece) {
  return part * kPartBytes + row * 128 + (piece ^ (row & 7)) * 16;
}

// The paged keys and values of a layer.
struct Source {
#if BOXES
  CUtensorMap keys, values;  // [slots, parts of all heads, 64]
#endif
  char* k;                   // [slots, kv_heads, HEAD_DIM]
  char* v;
  const int* page_table;     // [rows, columns]
  const Request* requests;
  int64_t slot_bytes;
  int64_t columns;

  __device__ const int* row(const Request& of) const { return page_table + of.row * columns; }
};

#if BOXES

// The slots of tiles' first tokens: a lane has one of 32 neighbouring tiles, so that one load is
// asked for long before most of them are needed.
class Slots {
 public:
  __device__ void begin(const Source& from, const Request& of, int tile, int lane) {
    first_ = tile;
    slot_ = load(from, of, tile, lane);
  }
  __device__ void go_on(const Source& from, const Request& of, int tile, int lane) {
    if (tile == first_ + 32) begin(from, of, tile, lane);
  }
  // Those of the request that comes next, and the change to it.
  __device__ void prepare(const Source& from, const Request& of, int lane) {
    following_ = load(from, of, of.first, lane);
  }
  __device__ void change(const Source&, const Request& of, int) {
    first_ = of.first;
    slot_ = following_;
  }
  __device__ int of(int tile) const { return __shfl_sync(kAll, slot_, tile - first_); }

 private:
  __device__ static int load(const Source& from, const Request& of, int tile, int lane) {
    return __ldcg(from.row(of) + min((tile - of.first + lane) * kTile, of.tokens - 1));
  }
  int first_, slot_, following_ = 0;
};

#else

// The slots of one tile's tokens, of which lane i has that of token i % 16: asked for one tile before
// they are needed.
class Slots {
 public:
  __device__ void begin(const Source& from, const Request& of, int tile, int lane) {
    const int token = min((tile - of.first) * kTile + lane % kTile, of.tokens - 1);
    slot_ = __ldcg(from.row(of) + token);
  }
  __device__ void go_on(const Source& from, const Request& of, int tile, int lane) {
    begin(from, of, tile, lane);
  }
  __device__ void prepare(const Source&, const Request&, int) {}
  __device__ void change(const Source& from, const Request& of, int lane) {
    begin(from, of, of.first, lane);
  }
  __device__ int of_row(int row) const { return __shfl_sync(kAll, slot_, row); }

 private:
  int slot_;
};

#endif

// A warp's ring of STAGES tiles: those of its chunk, one after the other.
class Ring {
 public:
  // `at`: where the tiles stand in shared memory, kRingBytes, and `barriers`, kBarrierBytes.
  __device__ Ring(const Source& from, const Chunk& chunk, int head, uint32_t at, uint32_t barriers,
                  int lane)
      : from_(from), at_(at), barriers_(barriers), lane_(lane), head_(head), end_(chunk.end),
        next_(chunk.start), index_(chunk.index), ahead_end_(chunk.request.end()),
        ahead_(chunk.request), following_(load(from.requests + chunk.index + 1)) {
#if BOXES
    if (lane == 0) {
      prefetch_map(&from.keys);
      prefetch_map(&from.values);
      for (int i = 0; i < STAGES; ++i) make_barrier(barriers + i * 8, 1);
      publish_barriers();
    }
    __syncwarp();
#endif
    slots_.begin(from, ahead_, next_, lane);
    if (ahead_end_ < end_) slots_.prepare(from, following_, lane);
  }

  // Whether `copy_next` copies the tile of a request's last token.
  __device__ bool next_is_last() const { return next_ + 1 == ahead_end_; }

  // Begins to copy the next tile, if there is one, to a stage that no lane reads any more.
  __device__ void copy_next(int stage) {
    if (next_ < end_) {
      copy(stage);
      if (++next_ < end_) find_slots();
    }
#if !BOXES
    end_group();
#endif
  }

  // Until the oldest tile that was not waited for has arrived, in this stage, for all lanes, which
  // then are done with the tile before.
  __device__ void wait(int stage) {
#if BOXES
    wait_barrier(barriers_ + stage * 8, parity_);
    if (stage == STAGES - 1) parity_ ^= 1;
#else
    wait_groups<STAGES - 2>();
#endif
    __syncwarp();
  }

 private:
  __device__ void find_slots() {
    if (next_ < ahead_end_) {
      slots_.go_on(from_, ahead_, next_, lane_);
      return;
    }
    ahead_ = following_;
    ahead_end_ = ahead_.end();
    slots_.change(from_, ahead_, lane_);
    if (ahead_end_ >= end_) return;
    following_ = load(from_.requests + ++index_ + 1);  // one entry stands after the last request
    slots_.prepare(from_, following_, lane_);
  }

  __device__ void copy(int stage) {
    const uint32_t to = at_ + stage * kStageBytes;
#if BOXES
    const int slot = slots_.of(next_);
    if (lane_ != 0) return;
    const uint32_t barrier = barriers_ + stage * 8;
    arrive_expecting(barrier, kStageBytes);
    copy_box_once(to, &from_.keys, slot, head_ * kParts, barrier);
    copy_box_once(to + kTileBytes, &from_.values, slot, head_ * kParts, barrier);
#else
#pragma unroll
    for (int i = 0; i < kTile * kPieces / 32; ++i) {
      const int row = i * (32 / kPieces) + lane_ / kPieces, piece = lane_ % kPieces;
      const int64_t at = slots_.of_row(row) * from_.slot_bytes + head_ * kRowBytes + piece * 16;
      const uint32_t place = to + in_tile(row, piece / 8, piece % 8);
      copy_async(place, from_.k + at);
      copy_async(place + kTileBytes, from_.v + at);
    }
#endif
  }

  const Source& from_;
  const uint32_t at_, barriers_;
  const int lane_, head_, end_;
  // The tile that is copied next, its request, and the request behind that.
  int next_, index_, ahead_end_;
  Request ahead_, following_;
  Slots slots_;
  uint32_t parity_ = 0;
};

}  // namespace minisgl
