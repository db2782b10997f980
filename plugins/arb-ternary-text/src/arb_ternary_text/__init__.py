"""Text: the decoder, tokenizers, data sources, causal masking and generation."""

__version__ = "0.1.0"
