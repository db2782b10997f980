"""Text: the decoder, tokenizers, the built-in text, streams of tokens, causal masking and
generation.
"""

__version__ = "0.1.0"
