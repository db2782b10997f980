"""Triton kernels for ARB Ternary: CUDA, ROCm, and Triton's interpreter on the CPU."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
