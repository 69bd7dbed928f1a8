"""A libnccl that does nothing and writes down what it was given, for tests without a GPU."""

import ctypes
from pathlib import Path

from minisgl_kernels.build import library

SOURCE = r"""
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

struct Id { char internal[128]; };
static char said[65536];
static int length = 0, failure = 0;
static void say(const char* form, ...) {
  va_list list;
  va_start(list, form);
  length += vsnprintf(said + length, sizeof said - length, form, list);
  va_end(list);
}
extern "C" {
const char* told() { return said; }
void forget() { said[length = 0] = 0; }
void fail_with(int code) { failure = code; }
const char* ncclGetErrorString(int code) { return code == 6 ? "remote error" : "invalid"; }
const char* ncclGetLastError(void*) { return "no such door\n"; }
int ncclGetVersion(int* out) { *out = 22809; return 0; }
int ncclGetUniqueId(Id* id) { for (int i = 0; i < 128; ++i) id->internal[i] = i; return 0; }
int ncclCommInitRank(void** comm, int size, Id id, int rank) {
  say("init %d of %d id %d %d\n", rank, size, id.internal[0], id.internal[127]);
  *comm = (void*)0x123456789a;
  return failure;
}
int ncclAllReduce(void* in, void* out, size_t n, int type, int op, void* comm, void* stream) {
  say("reduce %d %zu %d %d %p %p\n", in == out, n, type, op, comm, stream);
  return failure;
}
int ncclAllGather(void* in, void* out, size_t n, int type, void* comm, void* stream) {
  say("gather %d %zu %d %p %p\n", in == out, n, type, comm, stream);
  return failure;
}
int ncclCommGetAsyncError(void* comm, int* code) { *code = failure; return 0; }
int ncclCommAbort(void* comm) { say("abort %p\n", comm); return 0; }
int ncclMemAlloc(void** out, size_t n) { *out = malloc(n); return 0; }
int ncclMemFree(void* data) { say("free %d\n", data != nullptr); free(data); return 0; }
int ncclCommWindowRegister(void* comm, void* data, size_t n, void** window, int flags) {
  say("window %p %zu %d\n", comm, n, flags);
  *window = nullptr;
  return 0;
}
void ncclResetDebugInit() { say("debug %s\n", getenv("NCCL_DEBUG")); }
}
"""


def fake_nccl(folder: Path) -> ctypes.CDLL:
    """The library, compiled in `folder`. Raises `KernelUnavailable` without a compiler.

    `told()` is what it was given, one call a line; `fail_with(code)` makes calls fail from then on.
    """
    (folder / "fake_nccl.cpp").write_text(SOURCE)
    lib = library("fake_nccl", csrc=folder)
    lib.told.restype = ctypes.c_char_p
    lib.forget()
    lib.fail_with(0)
    return lib
