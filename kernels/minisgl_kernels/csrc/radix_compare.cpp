// The Python module of radix_compare.h. It takes anything with the buffer protocol, so it does not
// depend on the version of numpy. The GIL stays held: a comparison is shorter than letting it go.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>

#include "radix_compare.h"

namespace {

// Fills `view` with a one-dimensional contiguous int32 buffer, or sets TypeError and returns false.
bool acquire(PyObject* object, Py_buffer* view) {
  if (PyObject_GetBuffer(object, view, PyBUF_FORMAT | PyBUF_ND) != 0) {
    PyErr_Clear();  // of various types; a strided array, or no array at all
    PyErr_SetString(PyExc_TypeError, "token ids must be a contiguous int32 array");
    return false;
  }
  const bool int32 = view->itemsize == 4 && view->format != nullptr &&
                     (view->format[0] == 'i' || view->format[0] == 'l') && !view->format[1];
  if (int32 && view->ndim == 1) return true;
  PyErr_Format(PyExc_TypeError,
               "token ids must be a one-dimensional int32 array, not %d-dimensional of type '%s'",
               view->ndim, view->format ? view->format : "B");
  PyBuffer_Release(view);
  return false;
}

PyObject* common_prefix_len(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) {
    return PyErr_Format(PyExc_TypeError, "common_prefix_len takes 2 arguments, not %zd", count);
  }
  Py_buffer a, b;
  if (!acquire(args[0], &a)) return nullptr;
  if (!acquire(args[1], &b)) {
    PyBuffer_Release(&a);
    return nullptr;
  }
  const auto length = minisgl::common_prefix_len(static_cast<const std::int32_t*>(a.buf),
                                                 static_cast<const std::int32_t*>(b.buf),
                                                 std::min(a.shape[0], b.shape[0]));
  PyBuffer_Release(&a);
  PyBuffer_Release(&b);
  return PyLong_FromLongLong(length);
}

PyMethodDef methods[] = {
    {"common_prefix_len", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(common_prefix_len)),
     METH_FASTCALL, "common_prefix_len(a, b, /): length of the common prefix of two int32 arrays"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "radix_compare", nullptr, 0, methods,
                      nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_radix_compare() { return PyModule_Create(&module); }
