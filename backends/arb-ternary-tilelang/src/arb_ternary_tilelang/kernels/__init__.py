"""Kernels as TileLang programs, written once for every lane."""
