// In the place of csrc/hopper.cuh: the same functions. Copies are done at once; a descriptor is an
// address; blocks of a cluster are threads of the operating system, so one lock guards barriers.
#pragma once

#include <mutex>

#include "tensor_core.cuh"

struct CUtensorMap {  // of [rows, parts, 64] elements of 2 bytes, in boxes [box_parts, box_rows, 64]
  const char* data;
  int64_t rows, parts, row_bytes;
  int box_rows, box_parts;
};

namespace minisgl {

constexpr int kChunk = 64;

inline int make_box_map(CUtensorMap* map, const void* data, uint64_t rows, uint64_t parts,
                        uint64_t row_bytes, uint32_t box_rows, uint32_t box_parts) {
  *map = {static_cast<const char*>(data), int64_t(rows), int64_t(parts), int64_t(row_bytes),
          int(box_rows), int(box_parts)};
  return 0;
}
inline int make_tile_map(CUtensorMap* map, const void* data, uint64_t rows, uint64_t columns,
                         uint32_t tile_rows) {
  return make_box_map(map, data, rows, columns / kChunk, columns * 2, tile_rows, 1);
}

template <class... P, class... A>
int launch_clusters(void (*kernel)(P...), int64_t blocks, int, int threads, size_t shared,
                    cudaStream_t stream, A... arguments) {
  return launch(kernel, blocks, threads, shared, stream, arguments...);
}

// Two blocks come to each, one after the other.
inline int multiprocessor() { return blockIdx.x / 2; }
inline int64_t nanoseconds() { return 1; }

// ---- barriers

struct Barrier {  // 8 bytes, as the real one
  uint8_t expected, arrived;
  uint16_t phase;
  int32_t bytes;
  void settle() {
    if (arrived == expected && bytes == 0) arrived = 0, ++phase;
  }
};

inline std::mutex& barriers() {
  static std::mutex mutex;
  return mutex;
}

// Addresses of other blocks have the block's rank, counted from 1, above those of shared memory.
inline char* place(uint32_t address) {
  if (address >> 24 == 0) return shared_pointer(address);
  emulator::Block* other = emulator::block().cluster->blocks[(address >> 24) - 1];
  return reinterpret_cast<char*>(other->dynamic.data()) + (address & 0xffffff);
}
inline Barrier& barrier_at(uint32_t address) {
  return *reinterpret_cast<Barrier*>(place(address));
}
inline uint32_t address_in(uint32_t address, uint32_t rank) { return address | (rank + 1) << 24; }

inline void make_barrier(uint32_t barrier, int arrivals) {
  std::lock_guard<std::mutex> lock(barriers());
  barrier_at(barrier) = {static_cast<uint8_t>(arrivals), 0, 0, 0};
}
inline void publish_barriers() {}
inline void arrive_expecting(uint32_t barrier, uint32_t bytes) {
  std::lock_guard<std::mutex> lock(barriers());
  Barrier& b = barrier_at(barrier);
  ++b.arrived, b.bytes += static_cast<int32_t>(bytes);
  b.settle();
}
inline void arrive(uint32_t barrier) { arrive_expecting(barrier, 0); }
inline void wait_barrier(uint32_t barrier, uint32_t parity) {
  for (;;) {
    {
      std::lock_guard<std::mutex> lock(barriers());
      if ((barrier_at(barrier).phase & 1) != parity) return;
    }
    emulator::give_way();
  }
}

// ---- copies

inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

inline void copy_box_once(uint32_t to, const CUtensorMap* map, int row, int part, uint32_t barrier) {
  for (int i = 0; i < map->box_parts * map->box_rows; ++i) {
    const int64_t y = row + i % map->box_rows, x = part + i / map->box_rows;
    for (int piece = 0; piece < 8; ++piece) {
      const uint32_t at = (to & 0xffffff) + i * 128 + piece * 16;
      char* there = place((to & 0xff000000) | swizzled(at));
      if (y < map->rows && x < map->parts) {
        memcpy(there, map->data + y * map->row_bytes + x * 128 + piece * 16, 16);
      } else {
        memset(there, 0, 16);
      }
    }
  }
  std::lock_guard<std::mutex> lock(barriers());
  Barrier& b = barrier_at(barrier);
  b.bytes -= map->box_parts * map->box_rows * 128;
  b.settle();
}

inline void copy_tile(uint32_t to, const CUtensorMap* map, int row, int column, uint32_t barrier) {
  copy_box_once(to, map, row, column / kChunk, barrier);
}

inline void copy_tile_kept(uint32_t to, const CUtensorMap* map, int row, int column,
                           uint32_t barrier) {
  copy_tile(to, map, row, column, barrier);
}

inline void publish_memory() {}
inline void prefetch_map(const CUtensorMap*) {}
inline void arrive_cluster() { emulator::cluster_arrive(); }
inline void arrive_cluster_early() { emulator::cluster_arrive(); }
inline void wait_cluster() { emulator::cluster_wait(); }
inline float4 load_in_cluster(uint32_t address) {
  return *reinterpret_cast<const float4*>(place(address));
}

inline float4 load_pairs_in_cluster(uint32_t first, uint32_t second) {
  const float *const a = reinterpret_cast<const float*>(place(first)),
              *const b = reinterpret_cast<const float*>(place(second));
  return make_float4(a[0], a[1], b[0], b[1]);
}

// ---- products

inline uint64_t operand(uint32_t tile) { return tile >> 4; }
inline void begin_products() {}
inline void end_products() {}
template <int COUNT>
void wait_products() { __syncwarp(); }  // the warp goes on together, as it does there

inline float element_at(uint64_t tile, int row, int k) {
  const uint32_t at = static_cast<uint32_t>(tile) * 16 + row * 128 + k * 2;
  __nv_bfloat16 e;
  memcpy(&e, shared_pointer(swizzled(at)), 2);
  return to_float(e);
}

template <int EIGHTS>
void multiply(float (&d)[4 * EIGHTS], uint64_t a, uint64_t b) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  for (int i = 0; i < 4 * EIGHTS; ++i) {
    const int row = warp * 16 + lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    double sum = d[i];
    for (int k = 0; k < 16; ++k) sum += double{element_at(a, row, k)} * element_at(b, column, k);
    d[i] = static_cast<float>(sum);
  }
}

}  // namespace minisgl
