"""GGUF files: written for llama.cpp and the programs built on it, and read as runs."""
