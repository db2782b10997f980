"""Models as folders of Hugging Face's transformers: written from runs, and read into them."""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
