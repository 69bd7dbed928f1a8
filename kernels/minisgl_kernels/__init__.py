"""Kernels of MiniSGLang: small C++ and CUDA sources, each with a reference in Python.

One Python file for each kernel; `build` compiles the C++ ones when they are first used.
"""
