"""A tokenizer of bytes with control tokens, and a template that most models have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from arb_ternary_text.data.byte_level import BYTE_CHARACTERS
from arb_ternary_text.data.file_tokenizers import FileTokenizer
from arb_ternary_text.data.special_tokens import SpecialTokens
from arb_ternary_text.data.tokenizers import LanguageTokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer(control: Sequence[str], **special: Any) -> LanguageTokenizer:
    library = pytest.importorskip("tokenizers")
    characters = {character: number for number, character in enumerate(BYTE_CHARACTERS)}
    tokenizer = library.Tokenizer(library.models.BPE(characters, []))
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.add_special_tokens([library.AddedToken(text, special=True) for text in control])
    return LanguageTokenizer(FileTokenizer(tokenizer.to_str()), SpecialTokens(**special))


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., LanguageTokenizer]:
    """Return a factory of tokenizers of bytes; control tokens have the ids from 256 on."""
    return byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> LanguageTokenizer:
    """Return a tokenizer of bytes with <|im_start|> (256) and <|im_end|> (257), its end."""
    return byte_tokenizer(["<|im_start|>", "<|im_end|>"], eos=(257,), pad=256, chat_template=CHATML)
