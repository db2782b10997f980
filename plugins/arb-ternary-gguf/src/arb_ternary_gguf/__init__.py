"""GGUF files for ARB Ternary: export for llama.cpp and its kin, import of ternary models from
there.
"""

__version__ = "0.1.0"
