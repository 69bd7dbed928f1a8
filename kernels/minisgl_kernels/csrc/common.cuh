// What the CUDA sources share: arguments of TVM FFI's C ABI, launches, vectors, reductions.
//
// A library exports `extern "C" int __tvm_ffi_NAME(void*, const TVMFFIAny*, int32_t, TVMFFIAny*)`,
// made by EXPORT below; 0 is success, and an error was set otherwise. Only the C headers are
// included: the C++ ones would triple the time to compile.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#ifndef PDL
#define PDL 0
#endif
#ifndef DYNAMIC_SHARED
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

namespace minisgl {

constexpr unsigned kAll = 0xffffffffu;

// ---- host -------------------------------------------------------------------------------------

inline int failed(const char* message) {
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", message);
  return -1;
}

inline int check(cudaError_t error) {
  if (error == cudaSuccess) return 0;
  cudaGetLastError();  // this one is told here; the next call shall not find it again
  return failed(cudaGetErrorString(error));
}

// Arguments by position. A tensor that is None has no data.
struct Args {
  const TVMFFIAny* any;

  const DLTensor* tensor(int i) const {
    if (any[i].type_index == kTVMFFIDLTensorPtr) return static_cast<DLTensor*>(any[i].v_ptr);
    if (any[i].type_index != kTVMFFITensor) return nullptr;
    return reinterpret_cast<DLTensor*>(reinterpret_cast<char*>(any[i].v_obj) +
                                       sizeof(TVMFFIObject));
  }
  template <class P>
  P* data(int i) const {
    const DLTensor* t = tensor(i);
    return t ? reinterpret_cast<P*>(static_cast<char*>(t->data) + t->byte_offset) : nullptr;
  }
  int64_t size(int i, int dim) const { return tensor(i)->shape[dim]; }
  int64_t stride(int i, int dim) const { return tensor(i)->strides[dim]; }
  bool wide(int i) const { return tensor(i)->dtype.bits == 64; }
  int64_t integer(int i) const { return any[i].v_int64; }
  float number(int i) const {
    return any[i].type_index == kTVMFFIFloat ? static_cast<float>(any[i].v_float64)
                                             : static_cast<float>(any[i].v_int64);
  }
  cudaStream_t stream() const {  // argument 0 is always a tensor on the device
    const DLDevice device = tensor(0)->device;
    return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  }
};

// EXPORT_SUFFIX tells variants of one function in one library apart.
#ifndef EXPORT_SUFFIX
#define EXPORT_SUFFIX
#endif
#define EXPORT(name) EXPORT_AS(name, EXPORT_SUFFIX)
#define EXPORT_AS(name, suffix) EXPORT_JOINED(name, suffix)
#define EXPORT_JOINED(name, suffix)                                                             \
  static int run_##name(minisgl::Args args);                                                    \
  extern "C" __attribute__((visibility("default"))) int __tvm_ffi_##name##suffix(               \
      void*, const TVMFFIAny* any, int32_t, TVMFFIAny*) {                                       \
    return run_##name(minisgl::Args{any});                                                      \
  }                                                                                             \
  static int run_##name(minisgl::Args args)

// Launch, if the grid is not empty. With PDL the kernel may start while the one before ends, so
// each kernel calls `wait_for_previous` before it touches memory that another kernel writes.
template <class... P, class... A>
int launch(void (*kernel)(P...), int64_t blocks, int threads, size_t shared, cudaStream_t stream,
           A... arguments) {
  if (blocks == 0) return 0;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = PDL;
  return check(cudaLaunchKernelEx(&config, kernel, static_cast<P>(arguments)...));
}

// The widest access, 16 to 1 bytes, that divides all of these sizes and addresses.
inline int access_bytes(uint64_t all_or_ed) {
  for (int bytes = 16; bytes > 1; bytes /= 2) {
    if (all_or_ed % bytes == 0) return bytes;
  }
  return 1;
}

// `go` with a value of the type whose accesses are that wide, 2 bytes at least.
template <class Go>
int with_access(uint64_t all_or_ed, Go go) {
  switch (access_bytes(all_or_ed)) {
    case 16: return go(uint4{});
    case 8: return go(uint2{});
    case 4: return go(uint32_t{});
    default: return go(uint16_t{});
  }
}

inline uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

// ---- device -----------------------------------------------------------------------------------

// All that earlier kernels wrote can be read after this.
__device__ inline void wait_for_previous() {
#if PDL && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may be launched: it waits by itself for what it reads.
__device__ inline void launch_next() {
#if PDL && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <int BYTES>
struct Raw;
template <>
struct Raw<16> { using type = uint4; };
template <>
struct Raw<8> { using type = uint2; };
template <>
struct Raw<4> { using type = uint32_t; };
template <>
struct Raw<2> { using type = uint16_t; };

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

template <class E>
__device__ E from_float(float x);
template <>
__device__ inline float from_float<float>(float x) { return x; }
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16(x); }
template <>
__device__ inline __half from_float<__half>(float x) { return __float2half(x); }

// N elements that are loaded and stored in pieces of 16 bytes, or in one smaller piece.
template <class E, int N>
struct alignas(sizeof(E) * N > 16 ? 16 : sizeof(E) * N) Vec {
  static constexpr int kBytes = sizeof(E) * N;
  static constexpr int kPiece = kBytes > 16 ? 16 : kBytes;
  using Piece = typename Raw<kPiece>::type;
  E of[N];

  __device__ static Vec load(const E* from) {
    Vec v;
#pragma unroll
    for (int i = 0; i < kBytes / kPiece; ++i) {
      reinterpret_cast<Piece*>(v.of)[i] = reinterpret_cast<const Piece*>(from)[i];
    }
    return v;
  }
  __device__ void store(E* to) const {
#pragma unroll
    for (int i = 0; i < kBytes / kPiece; ++i) {
      reinterpret_cast<Piece*>(to)[i] = reinterpret_cast<const Piece*>(of)[i];
    }
  }
};

// Numbers in the order of floats, NaN above all; and back. A zero's sign is dropped first.
__device__ inline uint32_t ordered(float x) {
  if (x != x) return 0xffffffffu;
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

__device__ inline float unordered(uint32_t o) {
  return __uint_as_float(o >> 31 ? o ^ 0x80000000u : ~o);
}

// The sum over groups of LANES neighbouring lanes, a power of two; each lane gets it.
template <int LANES>
__device__ inline float group_sum(float x) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAll, x, step);
  return x;
}

}  // namespace minisgl
