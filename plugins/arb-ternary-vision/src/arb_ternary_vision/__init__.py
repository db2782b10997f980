"""Ternary models of images, data sources of images, and masking strategies for them."""

__version__ = "0.1.0"
