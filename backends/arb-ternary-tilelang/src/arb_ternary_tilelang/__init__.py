"""TileLang kernels. Nothing is imported here: TileLang and torch are loaded when the backend is
built.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
