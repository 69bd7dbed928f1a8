// What Hopper (sm_90a) has: barriers in shared memory that count bytes, copies of tiles by the tensor
// memory accelerator, products of a warpgroup (128 threads), clusters of blocks.
#pragma once

#include <cuda.h>

#include "tensor_core.cuh"

namespace minisgl {

// ---- host -------------------------------------------------------------------------------------

constexpr int kChunk = 64;  // elements of 2 bytes of a row in a tile: 128 bytes, the widest swizzle

// A map of a row-major matrix for copies of tiles [tile_rows, 64], swizzled by 128 bytes. What lies
// outside the matrix comes as zeros. 0, or an error was set.
inline int make_map(CUtensorMap* map, const void* data, uint64_t rows, uint64_t columns,
                    uint32_t tile_rows) {
  static decltype(&cuTensorMapEncodeTiled) encode = nullptr;  // of the driver, which is not linked
  if (encode == nullptr) {
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    void* function = nullptr;
    if (check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                               cudaEnableDefault, &found))) {
      return -1;
    }
    if (found != cudaDriverEntryPointSuccess) return failed("the driver has no tensor maps");
    encode = reinterpret_cast<decltype(encode)>(function);
  }
  const cuuint64_t sizes[2] = {columns, rows}, strides[1] = {columns * 2};
  const cuuint32_t box[2] = {kChunk, tile_rows}, steps[2] = {1, 1};
  const CUresult result = encode(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? 0 : failed("the driver refuses a tensor map");
}

// As `launch`, in clusters of blocks that share their shared memory.
template <class... P, class... A>
int launch_clusters(void (*kernel)(P...), int64_t blocks, int cluster, int threads, size_t shared,
                    cudaStream_t stream, A... arguments) {
  if (blocks == 0) return 0;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = cluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  config.attrs = attributes;
  config.numAttrs = 1 + PDL;
  return check(cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...));
}

// ---- device -----------------------------------------------------------------------------------

__device__ inline void make_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Barriers that this thread made are there for the accelerator and for the cluster.
__device__ inline void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// This thread arrives, and so many bytes are to arrive before the phase ends.
__device__ inline void arrive_expecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Until the phase of this parity is over.
__device__ inline void wait_barrier(uint32_t barrier, uint32_t parity) {
  uint32_t over = 0;
  while (!over) {
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(over)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

// The tile whose first element is [row, column], to shared memory, counted by the barrier.
__device__ inline void copy_tile(uint32_t to, const CUtensorMap* map, int row, int column,
                                 uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// The same to the same place in all these blocks of the cluster, and counted there.
__device__ inline void copy_tile_to(uint32_t blocks, uint32_t to, const CUtensorMap* map, int row,
                                    int column, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(column),
      "r"(row), "r"(barrier), "h"(static_cast<uint16_t>(blocks))
      : "memory");
}

// What this thread can see of the device's memory, the accelerator sees after this.
__device__ inline void publish_memory() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

__device__ inline void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ inline void arrive_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ inline void wait_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where a block of the cluster has what this one has at `address`.
__device__ inline uint32_t address_in(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

// `arrive` at a barrier of another block.
__device__ inline void arrive_in(uint32_t there) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(there)
               : "memory");
}

__device__ inline float4 load_in_cluster(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address) : "memory");
  return v;
}

// A tile of rows of 128 bytes, swizzled, as an operand: 1,024 bytes from 8 rows to the next 8. 16
// columns further on are 32 bytes, 2 in the descriptor's units. The tile starts at 1,024 bytes.
__device__ inline uint64_t operand(uint32_t tile) {
  return uint64_t{(tile & 0x3ffff) >> 4} | uint64_t{1} << 16 | uint64_t{64} << 32 |
         uint64_t{1} << 62;
}

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// All groups of products of this warpgroup but the last COUNT are done.
template <int COUNT>
__device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(COUNT) : "memory");
}

// d [64, 16 SIXTEENS] += a [64, 16] b [16 SIXTEENS, 16]^T, by the four warps of a warpgroup: warp w
// has rows 16 w and on, as `product` has them, and in d[4 n] and on columns 8 n to 8 n + 7.
template <int SIXTEENS>
__device__ void multiply(float (&d)[8 * SIXTEENS], uint64_t a, uint64_t b);

// clang-format off
#define AT_1 "%0, %1, %2, %3, %4, %5, %6, %7"
#define AT_2 AT_1 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define AT_3 AT_2 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define AT_4 AT_3 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define AT_5 AT_4 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define AT_6 AT_5 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define AT_7 AT_6 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define AT_8 AT_7 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define AT_9 AT_8 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define AT_10 AT_9 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define AT_11 AT_10 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define AT_12 AT_11 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define AT_13 AT_12 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define AT_14 AT_13 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define AT_15 AT_14 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define AT_16 AT_15 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define EIGHT(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                 "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define D_1 EIGHT(0)
#define D_2 D_1, EIGHT(8)
#define D_3 D_2, EIGHT(16)
#define D_4 D_3, EIGHT(24)
#define D_5 D_4, EIGHT(32)
#define D_6 D_5, EIGHT(40)
#define D_7 D_6, EIGHT(48)
#define D_8 D_7, EIGHT(56)
#define D_9 D_8, EIGHT(64)
#define D_10 D_9, EIGHT(72)
#define D_11 D_10, EIGHT(80)
#define D_12 D_11, EIGHT(88)
#define D_13 D_12, EIGHT(96)
#define D_14 D_13, EIGHT(104)
#define D_15 D_14, EIGHT(112)
#define D_16 D_15, EIGHT(120)
#define MULTIPLY(n, tokens, at_a, at_b)                                                           \
  template <>                                                                                     \
  __device__ inline void multiply<n>(float (&d)[8 * n], uint64_t a, uint64_t b) {                 \
    asm volatile("{.reg .pred more; setp.eq.u32 more, 0, 0; wgmma.mma_async.sync.aligned.m64n"    \
                 tokens "k16.f32.bf16.bf16 {" AT_##n "}, " at_a ", " at_b ", more, 1, 1, 0, 0;}"  \
                 : D_##n : "l"(a), "l"(b));                                                       \
  }
MULTIPLY(1, "16", "%8", "%9")
MULTIPLY(2, "32", "%16", "%17")
MULTIPLY(3, "48", "%24", "%25")
MULTIPLY(4, "64", "%32", "%33")
MULTIPLY(5, "80", "%40", "%41")
MULTIPLY(6, "96", "%48", "%49")
MULTIPLY(7, "112", "%56", "%57")
MULTIPLY(8, "128", "%64", "%65")
MULTIPLY(9, "144", "%72", "%73")
MULTIPLY(10, "160", "%80", "%81")
MULTIPLY(11, "176", "%88", "%89")
MULTIPLY(12, "192", "%96", "%97")
MULTIPLY(13, "208", "%104", "%105")
MULTIPLY(14, "224", "%112", "%113")
MULTIPLY(15, "240", "%120", "%121")
MULTIPLY(16, "256", "%128", "%129")
#undef MULTIPLY
#undef EIGHT
#undef AT_1
#undef D_1
#undef AT_2
#undef D_2
#undef AT_3
#undef D_3
#undef AT_4
#undef D_4
#undef AT_5
#undef D_5
#undef AT_6
#undef D_6
#undef AT_7
#undef D_7
#undef AT_8
#undef D_8
#undef AT_9
#undef D_9
#undef AT_10
#undef D_10
#undef AT_11
#undef D_11
#undef AT_12
#undef D_12
#undef AT_13
#undef D_13
#undef AT_14
#undef D_14
#undef AT_15
#undef D_15
#undef AT_16
#undef D_16
// clang-format on

}  // namespace minisgl
