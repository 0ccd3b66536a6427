"""Kernels of encoding and attention. Each file defines one operator: its contract and its torch
reference. The C++ kernels are in `cpu/`, the Triton kernels in `triton/`."""
