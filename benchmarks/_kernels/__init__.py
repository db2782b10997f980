"""Parts of kernels.py."""
