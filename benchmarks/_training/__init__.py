"""Parts of training.py."""
