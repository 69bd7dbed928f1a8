// Enough of CUDA to run the kernels' sources on a CPU, for tests of their logic without a GPU.
//
// A block is an operating system thread, its CUDA threads are fibers that give way to each other at
// barriers and warp exchanges only. So shared memory is thread-local memory, and the blocks of a
// cluster find each other's at the same distance from an anchor. Nothing here shows races.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <atomic>
#include <cmath>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __shared__ static thread_local
#define DYNAMIC_SHARED(type, name) auto* name = reinterpret_cast<type*>(emulator::dynamic_shared())
#define threadIdx (emulator::thread_index())
#define blockIdx (emulator::block_index())

#ifndef CLUSTER
#define CLUSTER 1
#endif

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  dim3(unsigned x) : x(x) {}
};
struct alignas(16) uint4 { uint32_t x, y, z, w; };
struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

namespace emulator {

constexpr size_t kStack = 1 << 16;

struct Meeting {  // of fibers of one block
  int arrived = 0, generation = 0;
  void wait(int expected);
};

struct Warp {
  Meeting meeting;
  uint64_t slot[32];
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  bool done = false;
};

struct Block;
struct Cluster {
  int threads;
  std::atomic<int> arrived{0}, generation{0}, started{0};
  char* anchors[CLUSTER];
  Block* blocks[CLUSTER];
};

struct Block {
  unsigned index, blocks;
  int rank, threads;
  Cluster* cluster;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Meeting meeting;
  std::vector<uint4> dynamic;
  ucontext_t scheduler;
  int current = 0;
  int arrived = 0, seen = 0;  // at the cluster's barrier: its fibers, and the barrier's generation
  void (*call)(void*);
  void* argument;
};

static thread_local Block* self = nullptr;
static thread_local char anchor;

inline Block& block() {
  // Never inlined: after a switch of fibers the compiler must not assume an address it knew.
  return *self;
}
inline dim3 thread_index() { return dim3(block().current); }
inline dim3 block_index() { return dim3(block().index); }
// No macros, because a launch's configuration has members of these names.
struct BlockSize {
  operator unsigned() const { return block().threads; }
};
struct GridSize {
  operator unsigned() const { return block().blocks; }
};
inline void* dynamic_shared() { return block().dynamic.data(); }

inline void give_way() {
  Block& b = block();
  swapcontext(&b.fibers[b.current].context, &b.scheduler);
}

inline void Meeting::wait(int expected) {
  const int before = generation;
  if (++arrived == expected) {
    arrived = 0, ++generation;
  } else {
    while (generation == before) give_way();
  }
}

inline void enter() {
  Block& b = block();
  b.call(b.argument);
  b.fibers[b.current].done = true;
  give_way();
}

inline void run_block(Block& b) {
  self = &b;
  b.cluster->anchors[b.rank] = &anchor;
  b.cluster->blocks[b.rank] = &b;
  b.cluster->started += 1;
  while (b.cluster->started < CLUSTER) std::this_thread::yield();
  for (Fiber& fiber : b.fibers) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  for (bool some = true; some;) {
    some = false;
    for (b.current = 0; b.current < b.threads; ++b.current) {
      if (b.fibers[b.current].done) continue;
      some = true;
      swapcontext(&b.scheduler, &b.fibers[b.current].context);
    }
  }
}

template <class T>
T exchange(T value, int from) {
  Block& b = block();
  const int me = b.current;
  Warp& warp = b.warps[me / 32];
  memcpy(&warp.slot[me % 32], &value, sizeof value);
  warp.meeting.wait(32);
  memcpy(&value, &warp.slot[from], sizeof value);
  warp.meeting.wait(32);
  return value;
}

inline void cluster_arrive() {
  Block& b = block();
  if (b.arrived++ == 0) b.seen = b.cluster->generation;
  if (++b.cluster->arrived == b.cluster->threads * CLUSTER) {
    b.cluster->arrived = 0;
    b.cluster->generation += 1;
    b.cluster->generation.notify_all();
  }
}

inline void cluster_wait() {
  Block& b = block();
  while (b.arrived < b.threads) give_way();
  b.cluster->generation.wait(b.seen);  // no fiber of this block could go on
  b.meeting.wait(b.threads);
  b.arrived = 0;
  b.meeting.wait(b.threads);
}

}  // namespace emulator

static const struct { emulator::BlockSize x; } blockDim;
static const struct { emulator::GridSize x; } gridDim;

inline void __syncwarp(unsigned = ~0u) {
  emulator::Block& b = emulator::block();
  b.warps[b.current / 32].meeting.wait(32);
}

inline void __syncthreads() { emulator::block().meeting.wait(emulator::block().threads); }

template <class T>
T __shfl_xor_sync(unsigned, T value, int step) {
  return emulator::exchange(value, emulator::block().current % 32 ^ step);
}

template <class T>
T __shfl_sync(unsigned, T value, int lane, int width = 32) {
  return emulator::exchange(value, emulator::block().current % 32 / width * width + lane % width);
}

inline uint32_t __reduce_max_sync(unsigned, uint32_t value) {
  emulator::Block& b = emulator::block();
  emulator::Warp& warp = b.warps[b.current / 32];
  warp.slot[b.current % 32] = value;
  warp.meeting.wait(32);
  for (uint64_t other : warp.slot) value = other > value ? static_cast<uint32_t>(other) : value;
  warp.meeting.wait(32);
  return value;
}

inline uint32_t __ballot_sync(unsigned, bool value) {
  emulator::Block& b = emulator::block();
  emulator::Warp& warp = b.warps[b.current / 32];
  warp.slot[b.current % 32] = value;
  warp.meeting.wait(32);
  uint32_t votes = 0;
  for (int i = 0; i < 32; ++i) votes |= static_cast<uint32_t>(warp.slot[i]) << i;
  warp.meeting.wait(32);
  return votes;
}

template <class T>
T __shfl_up_sync(unsigned, T value, int step) {
  const int lane = emulator::block().current % 32;
  return emulator::exchange(value, lane < step ? lane : lane - step);
}

inline int __popc(uint32_t x) { return __builtin_popcount(x); }

inline bool __any_sync(unsigned all, bool value) { return __reduce_max_sync(all, value) != 0; }

inline int __ffs(uint32_t x) { return __builtin_ffs(static_cast<int>(x)); }
inline void atomicMax(uint32_t* at, uint32_t value) {
  uint32_t seen = __atomic_load_n(at, __ATOMIC_SEQ_CST);
  while (seen < value && !__atomic_compare_exchange_n(at, &seen, value, false, __ATOMIC_SEQ_CST,
                                                      __ATOMIC_SEQ_CST)) {
  }
}
template <class T>  // also on the memory of another block of the cluster
T atomicAdd(T* at, T value) {
  return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);
}
inline int atomicExch(int* at, int value) { return __atomic_exchange_n(at, value, __ATOMIC_SEQ_CST); }
inline void __threadfence() {}
template <class T>
T __ldcg(const T* at) { return *at; }
template <class T>
void __stcg(T* at, T value) { *at = value; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __double2float_rd(double x) {
  const float f = static_cast<float>(x);
  return f > x ? std::nextafter(f, -HUGE_VALF) : f;
}
inline float __frcp_rd(float x) { return __double2float_rd(1.0 / x); }
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// ---- the runtime's functions ------------------------------------------------------------------

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
enum { cudaLaunchAttributeProgrammaticStreamSerialization };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum { cudaDevAttrMultiProcessorCount };
struct cudaLaunchAttribute {
  int id;
  struct { int programmaticStreamSerializationAllowed; } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  int numAttrs;
};

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int) { return cudaSuccess; }

template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int threads, size_t) {
  *blocks = 1024 / threads;
  return cudaSuccess;
}
inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, int, int) { return *value = 2, cudaSuccess; }

template <class... P>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), P... args) {
  auto call = [&] { kernel(args...); };
  const int threads = static_cast<int>(config->blockDim.x);
  const bool backwards = getenv("EMULATOR_BACKWARDS") != nullptr;  // the last block first
  for (unsigned done = 0; done < config->gridDim.x; done += CLUSTER) {
    const unsigned first = backwards ? config->gridDim.x - CLUSTER - done : done;
    emulator::Cluster cluster{threads};
    std::vector<std::thread> others;
    std::vector<emulator::Block> blocks(CLUSTER);
    for (int rank = 0; rank < CLUSTER; ++rank) {
      emulator::Block& b = blocks[rank];
      b.index = first + rank, b.blocks = config->gridDim.x, b.rank = rank, b.threads = threads, b.cluster = &cluster;
      b.fibers.resize(threads), b.warps.resize(threads / 32);
      b.dynamic.resize(config->dynamicSmemBytes / 16 + 1);
      b.call = [](void* f) { (*static_cast<decltype(call)*>(f))(); };
      b.argument = &call;
      if (rank) others.emplace_back([&b] { emulator::run_block(b); });
    }
    emulator::run_block(blocks[0]);
    for (std::thread& other : others) other.join();
  }
  return cudaSuccess;
}
