"""Parts of serving.py."""
