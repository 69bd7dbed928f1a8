// What Hopper (sm_90a) has: barriers in shared memory that count bytes, copies of tiles by the tensor
// memory accelerator, products of a warpgroup (128 threads), clusters of blocks.
#pragma once

#include <cuda.h>

#include "tensor_core.cuh"

namespace minisgl {

// ---- host -------------------------------------------------------------------------------------

constexpr int kChunk = 64;  // elements of 2 bytes of a row in a tile: 128 bytes, the widest swizzle

// A map of elements of 2 bytes for copies that are swizzled by 128 bytes: `sizes` and `box` from the
// inmost dimension on, `strides` in bytes from the next one on. What lies outside comes as zeros. 0,
// or an error was set.
template <int DIMS>
int make_map(CUtensorMap* map, const void* data, const cuuint64_t (&sizes)[DIMS],
             const cuuint64_t (&strides)[DIMS - 1], const cuuint32_t (&box)[DIMS]) {
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
  cuuint32_t steps[DIMS];
  for (cuuint32_t& step : steps) step = 1;
  // Promotion to more bytes than a copy has would cost rates near the memory's own.
  const CUresult result = encode(
      map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, DIMS, const_cast<void*>(data), sizes, strides, box,
      steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? 0 : failed("the driver refuses a tensor map");
}

// Of a row-major matrix, for copies of tiles [tile_rows, 64].
inline int make_tile_map(CUtensorMap* map, const void* data, uint64_t rows, uint64_t columns,
                         uint32_t tile_rows) {
  return make_map<2>(map, data, {columns, rows}, {columns * 2}, {kChunk, tile_rows});
}

// Of rows of `parts` times 64 elements, for copies of boxes: some neighbouring parts, one behind the
// other, each of [box_rows, 64].
inline int make_box_map(CUtensorMap* map, const void* data, uint64_t rows, uint64_t parts,
                        uint64_t row_bytes, uint32_t box_rows, uint32_t box_parts) {
  return make_map<3>(map, data, {kChunk, rows, parts}, {row_bytes, kChunk * 2},
                     {kChunk, box_rows, box_parts});
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

// The multiprocessor that this runs on.
__device__ inline int multiprocessor() {
  int number;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
  return number;
}

// The device's clock.
__device__ inline int64_t nanoseconds() {
  int64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time)::"memory");
  return time;
}

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

// The same; its memory leaves the L2 cache after other: what many blocks read.
__device__ inline void copy_tile_kept(uint32_t to, const CUtensorMap* map, int row, int column,
                                      uint32_t barrier) {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to), "l"(map), "r"(column), "r"(row),
      "r"(barrier), "l"(policy)
      : "memory");
}

// The box whose first element is [row, part, 0]; its memory leaves the L2 cache before other.
__device__ inline void copy_box_once(uint32_t to, const CUtensorMap* map, int row, int part,
                                     uint32_t barrier) {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to), "l"(map), "r"(0), "r"(row),
      "r"(part), "r"(barrier), "l"(policy)
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

// The same, but what this thread wrote need not be seen, so it does not wait for that either.
__device__ inline void arrive_cluster_early() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
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

__device__ inline float4 load_in_cluster(uint32_t address) {
  float4 v;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address) : "memory");
  return v;
}

// Two numbers each at two addresses of a block of the cluster.
__device__ inline float4 load_pairs_in_cluster(uint32_t first, uint32_t second) {
  float4 v;
  asm volatile("ld.shared::cluster.v2.f32 {%0,%1}, [%4]; ld.shared::cluster.v2.f32 {%2,%3}, [%5];"
               : "=&f"(v.x), "=&f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(first), "r"(second) : "memory");
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

// d [64, 8 EIGHTS] += a [64, 16] b [8 EIGHTS, 16]^T, by the four warps of a warpgroup: warp w has rows
// 16 w and on, as `product` has them, and in d[4 n] to d[4 n + 3] columns 8 n to 8 n + 7.
template <int EIGHTS>
__device__ void multiply(float (&d)[4 * EIGHTS], uint64_t a, uint64_t b);

// clang-format off
#define AT_1 "%0, %1, %2, %3"
#define AT_2 AT_1 ", %4, %5, %6, %7"
#define AT_3 AT_2 ", %8, %9, %10, %11"
#define AT_4 AT_3 ", %12, %13, %14, %15"
#define AT_5 AT_4 ", %16, %17, %18, %19"
#define AT_6 AT_5 ", %20, %21, %22, %23"
#define AT_7 AT_6 ", %24, %25, %26, %27"
#define AT_8 AT_7 ", %28, %29, %30, %31"
#define AT_9 AT_8 ", %32, %33, %34, %35"
#define AT_10 AT_9 ", %36, %37, %38, %39"
#define AT_11 AT_10 ", %40, %41, %42, %43"
#define AT_12 AT_11 ", %44, %45, %46, %47"
#define AT_13 AT_12 ", %48, %49, %50, %51"
#define AT_14 AT_13 ", %52, %53, %54, %55"
#define AT_15 AT_14 ", %56, %57, %58, %59"
#define AT_16 AT_15 ", %60, %61, %62, %63"
#define AT_17 AT_16 ", %64, %65, %66, %67"
#define AT_18 AT_17 ", %68, %69, %70, %71"
#define AT_19 AT_18 ", %72, %73, %74, %75"
#define AT_20 AT_19 ", %76, %77, %78, %79"
#define AT_21 AT_20 ", %80, %81, %82, %83"
#define AT_22 AT_21 ", %84, %85, %86, %87"
#define AT_23 AT_22 ", %88, %89, %90, %91"
#define AT_24 AT_23 ", %92, %93, %94, %95"
#define AT_25 AT_24 ", %96, %97, %98, %99"
#define AT_26 AT_25 ", %100, %101, %102, %103"
#define AT_27 AT_26 ", %104, %105, %106, %107"
#define AT_28 AT_27 ", %108, %109, %110, %111"
#define AT_29 AT_28 ", %112, %113, %114, %115"
#define AT_30 AT_29 ", %116, %117, %118, %119"
#define AT_31 AT_30 ", %120, %121, %122, %123"
#define AT_32 AT_31 ", %124, %125, %126, %127"
#define FOUR(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D_1 FOUR(0)
#define D_2 D_1, FOUR(4)
#define D_3 D_2, FOUR(8)
#define D_4 D_3, FOUR(12)
#define D_5 D_4, FOUR(16)
#define D_6 D_5, FOUR(20)
#define D_7 D_6, FOUR(24)
#define D_8 D_7, FOUR(28)
#define D_9 D_8, FOUR(32)
#define D_10 D_9, FOUR(36)
#define D_11 D_10, FOUR(40)
#define D_12 D_11, FOUR(44)
#define D_13 D_12, FOUR(48)
#define D_14 D_13, FOUR(52)
#define D_15 D_14, FOUR(56)
#define D_16 D_15, FOUR(60)
#define D_17 D_16, FOUR(64)
#define D_18 D_17, FOUR(68)
#define D_19 D_18, FOUR(72)
#define D_20 D_19, FOUR(76)
#define D_21 D_20, FOUR(80)
#define D_22 D_21, FOUR(84)
#define D_23 D_22, FOUR(88)
#define D_24 D_23, FOUR(92)
#define D_25 D_24, FOUR(96)
#define D_26 D_25, FOUR(100)
#define D_27 D_26, FOUR(104)
#define D_28 D_27, FOUR(108)
#define D_29 D_28, FOUR(112)
#define D_30 D_29, FOUR(116)
#define D_31 D_30, FOUR(120)
#define D_32 D_31, FOUR(124)
#define MULTIPLY(n, tokens, at_a, at_b)                                                           \
  template <>                                                                                     \
  __device__ inline void multiply<n>(float (&d)[4 * n], uint64_t a, uint64_t b) {                 \
    asm volatile("{.reg .pred more; setp.eq.u32 more, 0, 0; wgmma.mma_async.sync.aligned.m64n"    \
                 tokens "k16.f32.bf16.bf16 {" AT_##n "}, " at_a ", " at_b ", more, 1, 1, 0, 0;}"  \
                 : D_##n : "l"(a), "l"(b));                                                       \
  }
MULTIPLY(1, "8", "%4", "%5")
MULTIPLY(2, "16", "%8", "%9")
MULTIPLY(3, "24", "%12", "%13")
MULTIPLY(4, "32", "%16", "%17")
MULTIPLY(5, "40", "%20", "%21")
MULTIPLY(6, "48", "%24", "%25")
MULTIPLY(7, "56", "%28", "%29")
MULTIPLY(8, "64", "%32", "%33")
MULTIPLY(9, "72", "%36", "%37")
MULTIPLY(10, "80", "%40", "%41")
MULTIPLY(11, "88", "%44", "%45")
MULTIPLY(12, "96", "%48", "%49")
MULTIPLY(13, "104", "%52", "%53")
MULTIPLY(14, "112", "%56", "%57")
MULTIPLY(15, "120", "%60", "%61")
MULTIPLY(16, "128", "%64", "%65")
MULTIPLY(17, "136", "%68", "%69")
MULTIPLY(18, "144", "%72", "%73")
MULTIPLY(19, "152", "%76", "%77")
MULTIPLY(20, "160", "%80", "%81")
MULTIPLY(21, "168", "%84", "%85")
MULTIPLY(22, "176", "%88", "%89")
MULTIPLY(23, "184", "%92", "%93")
MULTIPLY(24, "192", "%96", "%97")
MULTIPLY(25, "200", "%100", "%101")
MULTIPLY(26, "208", "%104", "%105")
MULTIPLY(27, "216", "%108", "%109")
MULTIPLY(28, "224", "%112", "%113")
MULTIPLY(29, "232", "%116", "%117")
MULTIPLY(30, "240", "%120", "%121")
MULTIPLY(31, "248", "%124", "%125")
MULTIPLY(32, "256", "%128", "%129")
#undef MULTIPLY
#undef FOUR
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
#undef AT_17
#undef D_17
#undef AT_18
#undef D_18
#undef AT_19
#undef D_19
#undef AT_20
#undef D_20
#undef AT_21
#undef D_21
#undef AT_22
#undef D_22
#undef AT_23
#undef D_23
#undef AT_24
#undef D_24
#undef AT_25
#undef D_25
#undef AT_26
#undef D_26
#undef AT_27
#undef D_27
#undef AT_28
#undef D_28
#undef AT_29
#undef D_29
#undef AT_30
#undef D_30
#undef AT_31
#undef D_31
#undef AT_32
#undef D_32
// clang-format on

}  // namespace minisgl
