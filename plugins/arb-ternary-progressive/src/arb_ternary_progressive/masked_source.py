"""Another data source whose vocabulary has one more id at its end, for hidden tokens.

The streams stay as they are; only the tokenizer grows. Bytes need no such id: byte 255 occurs in no
UTF-8 text.
"""

from __future__ import annotations

import json
from typing import Any, Final

from attrs import frozen

from arb_ternary.config.choice import DataChoice
from arb_ternary.config.options import option
from arb_ternary.errors import DataError
from arb_ternary_text.data.file_tokenizers import FileTokenizer
from arb_ternary_text.data.source import StreamSource
from arb_ternary_text.data.tokenizers import (
    ByteTokenizer,
    CharacterTokenizer,
    IdTokenizer,
    Tokenizer,
)

#: The last code point. Unicode keeps it out of text for ever, for uses within a program.
_MASK: Final = "\U0010ffff"


@frozen(kw_only=True)
class WithMaskTokenConfig:
    """Options of the data source ``with_mask_token``."""

    source: DataChoice = option(help="the data source whose vocabulary gets the id")


def build(config: WithMaskTokenConfig) -> StreamSource:
    """The factory that the ``with_mask_token`` source registers."""
    source = config.source.build()
    if not isinstance(source, StreamSource):
        raise DataError(
            f"with_mask_token: the data source {config.source.name!r} is no stream of tokens"
        )
    return StreamSource(
        f"{source.name} with mask token",
        with_mask_token(source.tokenizer),
        source.train,
        source.validation,
    )


def with_mask_token(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer of the same kind with the ids of ``tokenizer`` and one more, the last, which no
    text is encoded to.

    Bytes are returned as they are: their last id is free already.

    Raises:
        DataError: the tokenizer is of a kind that is not known here, or uses the last code point
            already.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return tokenizer
    if isinstance(tokenizer, CharacterTokenizer):
        if tokenizer.alphabet[-1] == _MASK:
            raise DataError(
                "with_mask_token: the text holds U+10FFFF, which is to stand for hidden tokens"
            )
        return CharacterTokenizer(tokenizer.alphabet + _MASK)
    if isinstance(tokenizer, IdTokenizer):
        return IdTokenizer(tokenizer.vocabulary_size + 1)
    if isinstance(tokenizer, FileTokenizer):
        return _extended(tokenizer)
    raise DataError(
        f"with_mask_token: a tokenizer of the class {type(tokenizer).__name__} cannot get an id "
        f"more",
        "Set mask_token_id of the masking strategy to an id that the data does not use.",
    )


def _extended(tokenizer: FileTokenizer) -> FileTokenizer:
    """The file's tokenizer with one more added token, beyond its largest id."""
    definition: dict[str, Any] = json.loads(tokenizer.definition)
    size = tokenizer.vocabulary_size
    added = {
        "id": size,
        "content": _MASK,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    definition["added_tokens"] = [*(definition.get("added_tokens") or ()), added]
    extended = FileTokenizer(json.dumps(definition, ensure_ascii=False))
    if extended.vocabulary_size != size + 1:
        raise DataError(
            f"with_mask_token: the tokenizer file has {size} ids with gaps between them, and the "
            f"package `tokenizers` gives an added token another id than {size}",
            "Add a token of its own to the file, and set mask_token_id of the masking strategy to "
            "its id.",
        )
    return extended
