"""Parts of generation.py."""
