"""Benchmarks: `minisgl bench offline`, `minisgl bench serve` and `minisgl bench kernels`.

Each module offers `add_arguments(parser)` and `run(args) -> exit code`.
"""
