"""Kernels: compiled ones for CPUs in `kernels.cpu`, and a plain torch reference of each in `kernels.reference`."""
