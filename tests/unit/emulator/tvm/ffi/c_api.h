// The part of TVM FFI's and DLPack's C ABI that csrc/common.cuh uses.
#pragma once
#include <stdint.h>

typedef struct { int32_t device_type, device_id; } DLDevice;
typedef struct { uint8_t code, bits; uint16_t lanes; } DLDataType;
typedef struct {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} DLTensor;

enum { kTVMFFINone = 0, kTVMFFIInt = 1, kTVMFFIFloat = 3, kTVMFFIDLTensorPtr = 7, kTVMFFITensor = 70 };
typedef struct { uint64_t counts; int32_t type_index; uint32_t padding; void* deleter; } TVMFFIObject;
typedef struct {
  int32_t type_index;
  uint32_t zero_padding;
  union {
    int64_t v_int64;
    double v_float64;
    void* v_ptr;
    TVMFFIObject* v_obj;
  };
} TVMFFIAny;

extern "C" {
const char* emulator_error = nullptr;
}
inline void TVMFFIErrorSetRaisedFromCStr(const char*, const char* message) {
  emulator_error = message;
}
