"""Special tokens and the chat template of a model folder, in both directions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from arb_ternary.errors import DataError
from arb_ternary_interchange.huggingface.json_file import Values, read_object, read_text
from arb_ternary_text.data.file_tokenizers import FileTokenizer
from arb_ternary_text.data.special_tokens import SpecialTokens
from arb_ternary_text.data.tokenizers import (
    Tokenizer,
    special_tokens,
    token_text,
)

TEMPLATE_FILE: Final = "chat_template.jinja"
_TEMPLATE_JSON: Final = "chat_template.json"
_GENERATION: Final = "generation_config.json"
_CONFIG: Final = "config.json"
_MAX_BYTES: Final = 16 << 20
#: Name of the template among several that is used without asking for one.
_DEFAULT: Final = "default"


def with_special_tokens(
    folder: Path,
    tokenizer: Tokenizer,
    special: Mapping[str, str | None],
    settings: Mapping[str, Any],
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return a tokenizer with the special tokens and the template of its folder, and notes.

    The end tokens are the tokenizer's own, then those of ``generation_config.json``, or of
    ``config.json`` if there is no such file.

    Args:
        folder: the model folder.
        tokenizer: the tokenizer.
        special: texts of the tokens by role, such as ``eos_token``.
        settings: content of ``tokenizer_config.json``.

    Returns:
        the tokenizer as ``to_json`` writes it, and what is left out, one sentence each.

    Raises:
        DataError: a file is damaged.
    """
    state = tokenizer.to_json()
    size = tokenizer.vocabulary_size
    notes: list[str] = []

    def named(role: str) -> int | None:
        text = special.get(role)
        if text is None or not isinstance(tokenizer, FileTokenizer):
            return None
        return tokenizer.token_id(text)

    config = _object(folder / _CONFIG)
    generation = _object(folder / _GENERATION) or config

    def stated(name: str) -> list[int]:
        found = generation.get(name)
        numbers = found if isinstance(found, list) else [found]
        known = [each for each in numbers if type(each) is int and 0 <= each < size]
        for each in numbers:
            if each is not None and each not in known:
                notes.append(f"{name} {each!r} is no id of the tokenizer, and is left out.")
        return known

    own_end = named("eos_token")
    ends = [*([] if own_end is None else [own_end]), *stated("eos_token_id")]
    bos = named("bos_token")
    pad = named("pad_token")
    template, more = _template(folder, settings)
    notes += more
    adds_bos, adds_eos = _added(tokenizer, bos, own_end, settings)
    found = SpecialTokens(
        bos=bos if bos is not None else next(iter(stated("bos_token_id")), None),
        eos=tuple(dict.fromkeys(ends)),
        pad=pad if pad is not None else next(iter(stated("pad_token_id")), None),
        unk=named("unk_token"),
        adds_bos=adds_bos,
        adds_eos=adds_eos,
        chat_template=template,
    )
    if found == SpecialTokens():
        return state, tuple(notes)
    return {"kind": "language", "tokenizer": state, "special": found.to_json()}, tuple(notes)


def _object(path: Path) -> Mapping[str, Any]:
    return read_object(path, _MAX_BYTES) if path.is_file() else {}


def _template(folder: Path, settings: Mapping[str, Any]) -> tuple[str | None, list[str]]:
    """Return the chat template, as transformers looks for it, and notes."""
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return read_text(path, _MAX_BYTES), []
    path = folder / _TEMPLATE_JSON
    if path.is_file():
        return Values(str(path), read_object(path, _MAX_BYTES)).text("chat_template"), []
    found = settings.get("chat_template")
    if found is None or isinstance(found, str):
        return found, []
    try:
        by_name = {each["name"]: each["template"] for each in found}
        chosen = by_name[_DEFAULT]
    except (TypeError, KeyError):
        return None, ["The chat templates have none of the name 'default', and are left out."]
    if not isinstance(chosen, str):
        raise DataError(f"{folder / 'tokenizer_config.json'}: the chat template is no text")
    others = [name for name in by_name if name != _DEFAULT]
    left_out = [f"Chat templates that are left out: {', '.join(map(str, others))}."]
    return chosen, left_out if others else []


def _added(
    tokenizer: Tokenizer, bos: int | None, eos: int | None, settings: Mapping[str, Any]
) -> tuple[bool, bool]:
    """Return whether the tokenizer adds BOS and EOS to a text."""
    found = (False, False)
    if isinstance(tokenizer, FileTokenizer):
        found = tokenizer.adds(bos, eos)
    flags = [settings.get("add_bos_token"), settings.get("add_eos_token")]
    adds_bos, adds_eos = (
        given if isinstance(given, bool) else own for given, own in zip(flags, found, strict=True)
    )
    return adds_bos and bos is not None, adds_eos and eos is not None


# --- out


def special_token_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the keys of ``tokenizer_config.json`` for special tokens."""
    special = special_tokens(tokenizer)
    roles = {
        "bos_token": special.bos,
        "eos_token": next(iter(special.eos), None),
        "pad_token": special.pad,
        "unk_token": special.unk,
    }
    texts = {role: token_text(tokenizer, token) for role, token in roles.items()}
    return {
        **{role: text for role, text in texts.items() if text is not None},
        "add_bos_token": special.adds_bos,
        "add_eos_token": special.adds_eos,
    }


def write_template(folder: Path, tokenizer: Tokenizer) -> None:
    """Write the chat template, if there is one."""
    template = special_tokens(tokenizer).chat_template
    if template is not None:
        (folder / TEMPLATE_FILE).write_text(template, encoding="utf-8")


def token_ids(special: SpecialTokens) -> dict[str, Any]:
    """Return the ids of special tokens as ``config.json`` and ``generation_config.json`` do."""
    ends: Any = list(special.eos)
    if len(ends) < 2:
        ends = next(iter(ends), None)
    return {"bos_token_id": special.bos, "eos_token_id": ends, "pad_token_id": special.pad}


def adding_definition(tokenizer: Tokenizer, definition: str) -> str:
    """Return a ``tokenizer.json`` that adds BOS and EOS to a text as ``tokenizer`` does.

    Args:
        tokenizer: the tokenizer with its special tokens.
        definition: its ``tokenizer.json``, which may add none, or others.
    """
    special = special_tokens(tokenizer)
    end = next(iter(special.eos), None)
    wanted = (special.adds_bos, special.adds_eos)
    base = FileTokenizer(definition)
    if base.adds(special.bos, end) == wanted:
        return definition
    pieces: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    tokens: dict[str, Any] = {}
    for adds, token, place in ((special.adds_bos, special.bos, 0), (special.adds_eos, end, 2)):
        if not adds or token is None:
            continue
        text = base.token_text(token)
        pieces.insert(place, {"SpecialToken": {"id": text, "type_id": 0}})
        tokens[text] = {"id": text, "ids": [token], "tokens": [text]}
    content = json.loads(definition)
    content["post_processor"] = None
    if tokens:
        second = {"Sequence": {"id": "B", "type_id": 1}}
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": pieces,
            "pair": [*pieces, second],
            "special_tokens": tokens,
        }
    return json.dumps(content, ensure_ascii=False)
