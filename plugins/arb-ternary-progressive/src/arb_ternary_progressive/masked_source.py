"""The data source ``with_mask_token``: another source with one more id for hidden tokens.

The streams are unchanged; only the tokenizer grows. Bytes need no such id: byte 255 does not occur
in UTF-8 text.
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

#: The last code point, a noncharacter that Unicode reserves for internal use.
_MASK: Final = "\U0010ffff"


@frozen(kw_only=True)
class WithMaskTokenConfig:
    """Options of the data source ``with_mask_token``."""

    source: DataChoice = option(help="data source whose vocabulary gets one more id")


def build(config: WithMaskTokenConfig) -> StreamSource:
    """Build the data source ``with_mask_token``."""
    source = config.source.build()
    if not isinstance(source, StreamSource):
        raise DataError(
            f"with_mask_token: the data source {config.source.name!r} is not a stream of tokens"
        )
    return StreamSource(
        f"{source.name} with mask token",
        with_mask_token(source.tokenizer),
        source.train,
        source.validation,
    )


def with_mask_token(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer of the same kind with one more id, the last, which no text is encoded to.

    A byte tokenizer is returned as it is, because its last id is free.

    Raises:
        DataError: the tokenizer is of an unknown kind, or uses the last code point already.
    """
    if isinstance(tokenizer, ByteTokenizer):
        return tokenizer
    if isinstance(tokenizer, CharacterTokenizer):
        if tokenizer.alphabet[-1] == _MASK:
            raise DataError(
                "with_mask_token: the text contains U+10FFFF, which is needed for hidden tokens"
            )
        return CharacterTokenizer(tokenizer.alphabet + _MASK)
    if isinstance(tokenizer, IdTokenizer):
        return IdTokenizer(tokenizer.vocabulary_size + 1)
    if isinstance(tokenizer, FileTokenizer):
        return _extended(tokenizer)
    raise DataError(
        f"with_mask_token: a tokenizer of the class {type(tokenizer).__name__} cannot get another "
        f"id",
        "Set mask_token_id of the masking strategy to an id that the data does not use.",
    )


def _extended(tokenizer: FileTokenizer) -> FileTokenizer:
    """Return the tokenizer with one more added token, after its largest id."""
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
            f"with_mask_token: the tokenizer file has {size} ids with gaps between them, so the "
            f"package `tokenizers` does not give an added token the id {size}",
            "Add a mask token to the file, and set mask_token_id of the masking strategy to its "
            "id.",
        )
    return extended
