"""Images: ternary models of them, their data and masking."""

__version__ = "0.1.0"
