"""Trackers that show a run in TensorBoard, Weights & Biases and trackio."""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
