"""The files beside a tokenizer that add tokens to it, as transformers reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from arb_ternary_interchange.huggingface.json_file import Values, read_object
from arb_ternary_interchange.huggingface.known import (
    HARMLESS_OF_TOKENIZER,
    NEUTRAL_OF_TOKENIZER,
    note_of,
    unknown_keys,
)

CONFIG: Final = "tokenizer_config.json"
ADDED: Final = "added_tokens.json"
SPECIAL: Final = "special_tokens_map.json"
#: Key of :data:`CONFIG`.
PREFIX_SPACE: Final = "add_prefix_space"

#: Largest of these files; templates of dialogues are in one of them.
_MAX_BYTES: Final = 16 << 20
_ROLES: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_LISTS: Final = ("additional_special_tokens", "extra_special_tokens")
_MAX_ID: Final = 1 << 31
_MOST_DIGITS: Final = 10


@frozen
class TokenizerSettings:
    """The content of the files beside a tokenizer.

    Attributes:
        class_name: its class in transformers; None if no file says.
        added: id of each added token by its text.
        special: texts of special tokens, which are found whole in a text; a role that no file
            gives a token has the text None.
        prefix_space: whether a space is put before a text; None if no file says.
        notes: keys that are not used, one sentence each.
    """

    class_name: str | None
    added: Mapping[str, int]
    special: Mapping[str, str | None]
    prefix_space: bool | None
    notes: tuple[str, ...]


def read_settings(folder: Path) -> TokenizerSettings:
    """Read the files beside the tokenizer of a model folder, as far as they are there.

    Raises:
        DataError: one is damaged, or a key has a value of another type.
    """
    config = _values(folder / CONFIG)
    class_name = config.text("tokenizer_class")
    decoder = config.within("added_tokens_decoder")
    prefix_space = config.boolean(PREFIX_SPACE) if PREFIX_SPACE in config else None
    special = _special_tokens(config)
    notes: list[str] = []
    special_map = _values(folder / SPECIAL)
    older_special = {
        role: text for role, text in _special_tokens(special_map).items() if text is not None
    }
    notes += note_of(f"Keys of {SPECIAL} that are not used here", list(special_map.unused()))
    if decoder is None:
        # Older files: transformers reads them only if there is no 'added_tokens_decoder'.
        special |= older_special
        listed_ids = _values(folder / ADDED)
        added = {text: listed_ids.integer(text, 0, _MAX_ID) for text in listed_ids.found}
    else:
        added = {_decoded(decoder, key): int(key) for key in decoder.found}
        listed = {*added, *special.values()}
        older = dict.fromkeys([*_values(folder / ADDED).found, *older_special.values()])
        passed_over = [text for text in older if text not in listed]
        notes += note_of(
            f"Tokens of {ADDED} or {SPECIAL} that 'added_tokens_decoder' of {CONFIG} leaves out",
            passed_over,
        )
    unknown = unknown_keys(config.unused(), HARMLESS_OF_TOKENIZER, NEUTRAL_OF_TOKENIZER)
    notes += note_of(f"Keys of {CONFIG} that are not used here", unknown)
    return TokenizerSettings(class_name, added, special, prefix_space, tuple(notes))


def _values(path: Path) -> Values:
    """Return the content of a JSON file; nothing if there is no such file."""
    return Values(str(path), read_object(path, _MAX_BYTES) if path.is_file() else {})


def _special_tokens(values: Values) -> dict[str, str | None]:
    """Return the special tokens of a file, by role or by place in a list."""
    found: dict[str, str | None] = {}
    for role in _ROLES:
        if role in values.found:
            found[role] = _content(values, role, values.found[role])
    for key in _LISTS:
        listed = values.found.get(key) or []
        if isinstance(listed, dict):  # names of further roles
            listed = list(listed.values())
        if not isinstance(listed, list):
            raise values.wrong(key, "a list of tokens")
        for place, token in enumerate(listed):
            found[f"{key}.{place}"] = _content(values, key, token)
    values.looked_at.update((*_ROLES, *_LISTS))
    return found


def _content(values: Values, key: str, token: Any) -> str | None:
    """Return the text of a token, which is a string, an object with a ``content``, or null."""
    text = token.get("content", 0) if isinstance(token, dict) else token
    if text is not None and (type(text) is not str or not text):
        raise values.wrong(key, "a token: a string, or an object with a string 'content'")
    return text


def _decoded(decoder: Values, key: str) -> str:
    """Return the text of one token of ``added_tokens_decoder``, whose keys are ids."""
    token = decoder.within(key)
    if token is None or not key.isdecimal() or len(key) > _MOST_DIGITS:
        raise decoder.wrong(key, "an id with an object")
    text = _content(decoder, key, token.found)
    if text is None:
        raise token.wrong("content", "a string")
    token.looked_at.update(token.found)
    return text
