"""A tokenizer of bytes."""

from __future__ import annotations

from typing import Any

from arb_ternary_text.data.byte_level import BYTE_CHARACTERS
from arb_ternary_text.data.file_tokenizers import FileTokenizer
from arb_ternary_text.data.special_tokens import SpecialTokens
from arb_ternary_text.data.tokenizers import LanguageTokenizer


def byte_tokenizer(special: SpecialTokens) -> LanguageTokenizer:
    """Return a tokenizer whose ids are bytes; 256 and 257 are ``<s>`` and ``</s>``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    library: Any = Tokenizer(models.BPE({c: i for i, c in enumerate(BYTE_CHARACTERS)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    return LanguageTokenizer(FileTokenizer(library.to_str()), special)
