"""The key ``add_prefix_space`` of ``tokenizer_config.json``: a space before a text.

transformers' classes for GPT-2 and Qwen 2 follow it, whatever the ``tokenizer.json`` does; the
class that takes a file as it is does not read it. For others it has to say what the file does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from arb_ternary.errors import DataError
from arb_ternary_interchange.huggingface.added_tokens import (
    CONFIG,
    PREFIX_SPACE,
    SAVE_AGAIN,
    TokenizerSettings,
)


def has_prefix_space(definition: Mapping[str, Any]) -> bool:
    """Whether the tokenizer of a ``tokenizer.json`` puts a space before a text."""
    for part in _parts(definition):
        kind = part["type"]
        if kind == "Prepend":
            return True
        if kind == "ByteLevel" and part.get(PREFIX_SPACE, True):
            return True
        # Older files have the key, newer ones a scheme.
        if kind == "Metaspace" and part.get("prepend_scheme", "always") != "never":
            return bool(part.get(PREFIX_SPACE, True))
    return False


def set_prefix_space(definition: dict[str, Any], wanted: bool) -> bool:
    """Make a byte-level tokenizer put a space before a text, or not; return whether it changed."""
    before = definition.get("pre_tokenizer")
    definition["pre_tokenizer"] = deepcopy(before)
    for part in _parts(definition):
        if part["type"] == "ByteLevel":
            part[PREFIX_SPACE] = wanted
    return bool(definition["pre_tokenizer"] != before)


def check_prefix_space(found: bool, settings: TokenizerSettings, where: Path) -> None:
    """Raise DataError if the files beside a tokenizer say of the space before a text anything else
    than what the tokenizer does.
    """
    wanted = settings.prefix_space
    if wanted is None or wanted == found:
        return
    does = "puts a space" if found else "puts no space"
    raise DataError(
        f"{where}: {does} before a text, and {PREFIX_SPACE!r} of {CONFIG} is {str(wanted).lower()}",
        SAVE_AGAIN,
    )


def _parts(definition: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the steps of the normalizer and of the pre-tokenizer."""
    left = [definition.get("pre_tokenizer"), definition.get("normalizer")]
    while left:
        part = left.pop()
        if part is None:
            continue
        left += reversed(part.get("normalizers") or part.get("pretokenizers") or ())
        yield part
