"""Native CPU kernels for ARB Ternary; the instruction set is chosen at run time."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
