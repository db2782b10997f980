"""Parts of quality.py."""
