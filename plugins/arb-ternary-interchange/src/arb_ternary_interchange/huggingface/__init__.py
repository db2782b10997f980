"""Model folders of Hugging Face's transformers: written from runs, and read as runs."""
