"""Runs: from a config file to a trained model, its checkpoints, metrics and report."""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
