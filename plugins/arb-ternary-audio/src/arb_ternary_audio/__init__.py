"""Data sources of sounds, their features, and codes of sounds for language models."""

__version__ = "0.1.0"
