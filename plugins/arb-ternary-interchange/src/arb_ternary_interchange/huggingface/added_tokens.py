"""The files beside a tokenizer that add tokens to it, as transformers reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from arb_ternary.errors import DataError
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

#: What makes a ``tokenizer.json`` of any other files.
SAVE_AGAIN: Final = (
    "Make a tokenizer.json where transformers is installed: "
    "`AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`."
)

#: The start of a note on special tokens.
NO_ID: Final = "Special tokens that have no id of the model, and are left out"

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
        added: added tokens in the order of their ids, as a ``tokenizer.json`` lists them.
        special: texts of special tokens, which are found whole in a text; a role that no file
            gives a token has the text None.
        prefix_space: whether a space is put before a text; None if no file says.
        notes: keys that are not used, one sentence each.
    """

    class_name: str | None
    added: tuple[Mapping[str, Any], ...]
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
        added = _from_ids(_values(folder / ADDED), special)
    else:
        added = [_from_decoder(decoder, key, special) for key in decoder.found]
        listed = {*(token["content"] for token in added), *special.values()}
        older = dict.fromkeys([*_values(folder / ADDED).found, *older_special.values()])
        passed_over = [text for text in older if text not in listed]
        notes += note_of(
            f"Tokens of {ADDED} or {SPECIAL} that 'added_tokens_decoder' of {CONFIG} leaves out",
            passed_over,
        )
    added.sort(key=lambda token: int(token["id"]))
    unknown = unknown_keys(config.unused(), HARMLESS_OF_TOKENIZER, NEUTRAL_OF_TOKENIZER)
    notes += note_of(f"Keys of {CONFIG} that are not used here", unknown)
    return TokenizerSettings(class_name, tuple(added), special, prefix_space, tuple(notes))


def added_token(number: int, text: str, *, special: bool, **flags: bool) -> dict[str, Any]:
    """Return an added token as a ``tokenizer.json`` lists it.

    Args:
        number: its id.
        text: its text.
        special: whether it is special; others are found after a text is normalised, unless
            ``normalized`` says otherwise.
        flags: ``single_word``, ``lstrip``, ``rstrip`` and ``normalized``.
    """
    return {
        "id": number,
        "content": text,
        "single_word": flags.get("single_word", False),
        "lstrip": flags.get("lstrip", False),
        "rstrip": flags.get("rstrip", False),
        "normalized": flags.get("normalized", not special),
        "special": special,
    }


def with_added_tokens(
    definition: dict[str, Any],
    settings: TokenizerSettings,
    where: Path,
    vocabulary_size: int | None = None,
) -> tuple[bool, tuple[str, ...]]:
    """Add to the content of a ``tokenizer.json`` what the files beside it add.

    Special tokens without an id get the following ids, as in transformers.

    Args:
        definition: the content, which is changed.
        settings: the files beside it.
        where: the file, for errors.
        vocabulary_size: number of ids of the model; special tokens without an id get none from
            there on. None if it is not known.

    Returns:
        whether anything was added, and the special tokens that got no id, as a note.

    Raises:
        DataError: a token has two ids, or would get another id than the files say.
    """
    vocabulary = _ids(definition)
    there = {token["content"]: token["id"] for token in definition.get("added_tokens") or ()}
    ids = {**vocabulary, **there}
    # The library counts on from the largest id when it reads the file.
    following = max([len(vocabulary), *(number + 1 for number in there.values())])
    new: list[Mapping[str, Any]] = []
    for token in settings.added:
        text = token["content"]
        number = token["id"]
        known = ids.get(text)
        if known is None and number == following:
            following += 1
        elif known is None or known != number:
            got = following if known is None else known
            raise DataError(
                f"{where}: the added token {text[:120]!r} has the id {number} in the files beside "
                f"it, and would have {got}",
                SAVE_AGAIN,
            )
        if text not in there:
            new.append(token)
            there[text] = number
            ids[text] = number
    without_id = []
    for text in dict.fromkeys(text for text in settings.special.values() if text is not None):
        if text not in ids:
            if vocabulary_size is not None and following >= vocabulary_size:
                without_id.append(repr(text))
                continue
            ids[text] = following
            following += 1
        if text not in there:
            new.append(added_token(ids[text], text, special=True))
            there[text] = ids[text]
    definition["added_tokens"] = [*(definition.get("added_tokens") or ()), *new]
    return bool(new), note_of(NO_ID, without_id)


def _ids(definition: Mapping[str, Any]) -> dict[str, int]:
    """Return the id of each token of a model of the library; unigrams are a list."""
    vocabulary = definition["model"]["vocab"]
    if isinstance(vocabulary, dict):
        return dict(vocabulary)
    return {text: number for number, (text, _score) in enumerate(vocabulary)}


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


def _from_ids(values: Values, special: Mapping[str, str | None]) -> list[dict[str, Any]]:
    """Return the added tokens of a file of ids by text."""
    added = []
    for text in values.found:
        number = values.integer(text, 0, _MAX_ID)
        added.append(added_token(number, text, special=text in special.values()))
    return added


def _from_decoder(decoder: Values, key: str, special: Mapping[str, str | None]) -> dict[str, Any]:
    """Return one token of ``added_tokens_decoder``, whose keys are ids."""
    token = decoder.within(key)
    if token is None or not key.isdecimal() or len(key) > _MOST_DIGITS:
        raise decoder.wrong(key, "an id with an object")
    text = _content(decoder, key, token.found)
    if text is None:
        raise token.wrong("content", "a string")
    is_special = token.boolean("special", False)
    flags = {
        name: token.boolean(name)
        for name in ("single_word", "lstrip", "rstrip", "normalized")
        if name in token
    }
    token.looked_at.update(token.found)
    return added_token(int(key), text, special=is_special or text in special.values(), **flags)
