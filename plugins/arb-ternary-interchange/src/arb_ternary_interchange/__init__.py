"""Models going out and coming in: export, import and inspection of models in several formats."""

__version__ = "0.1.0"
