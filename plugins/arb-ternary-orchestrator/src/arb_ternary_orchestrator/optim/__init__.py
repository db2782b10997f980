"""Optimizers of float parameters, and wrappers that change what an optimizer sees or does."""
