"""Sounds: their data, features and models."""

__version__ = "0.1.0"
