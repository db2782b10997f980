"""Special tokens and the chat template of a GGUF file, in both directions.

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md lists the keys.
"""

from __future__ import annotations

from typing import Final

from arb_ternary_interchange.gguf.metadata import Metadata
from arb_ternary_interchange.gguf.values import Kind, Scalar, Value
from arb_ternary_text.data.special_tokens import SpecialTokens

CHAT_TEMPLATE: Final = "tokenizer.chat_template"
#: Keys of the tokens that end a text or an answer, in the order of ``SpecialTokens.eos``.
END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
#: Ways of splitting with which llama.cpp adds BOS unless the file says otherwise.
_ADDING_BOS: Final = ("llama3", "llama-v3", "llama-bpe", "falcon3")


def read_special_tokens(
    metadata: Metadata, vocabulary_size: int
) -> tuple[SpecialTokens, tuple[str, ...]]:
    """Return the special tokens of a file, and a sentence for each that cannot be used.

    Args:
        metadata: metadata of the file.
        vocabulary_size: number of ids of the tokenizer.
    """
    notes: list[str] = []

    def token(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}")
        if value is None or (type(value) is int and 0 <= value < vocabulary_size):
            return value
        notes.append(f"tokenizer.ggml.{name} is {value!r}, which is no id of the tokenizer")
        return None

    def flag(name: str, default: bool) -> bool:
        value = metadata.get(f"tokenizer.ggml.{name}", default)
        if type(value) is bool:
            return value
        notes.append(f"tokenizer.ggml.{name} is {value!r}, which is neither true nor false")
        return default

    ends = [number for number in map(token, END_KEYS) if number is not None]
    bos = token("bos_token_id")
    template = metadata.get(CHAT_TEMPLATE)
    if template is not None and not isinstance(template, str):
        notes.append(f"{CHAT_TEMPLATE} is no text")
        template = None
    adds_bos = flag("add_bos_token", metadata.get("tokenizer.ggml.pre") in _ADDING_BOS)
    adds_eos = flag("add_eos_token", False)
    for name, adds, named in (("bos", adds_bos, bos is not None), ("eos", adds_eos, bool(ends))):
        if adds and not named:
            notes.append(
                f"tokenizer.ggml.add_{name}_token is true, but there is no {name}_token_id"
            )
    special = SpecialTokens(
        bos=bos,
        eos=tuple(dict.fromkeys(ends)),
        pad=token("padding_token_id"),
        unk=token("unknown_token_id"),
        adds_bos=adds_bos and bos is not None,
        adds_eos=adds_eos and bool(ends),
        chat_template=template,
    )
    return special, tuple(notes)


def special_token_keys(special: SpecialTokens) -> dict[str, Value]:
    """Return the metadata of special tokens, except for ends beyond the third."""
    numbers: list[tuple[str, int | None]] = [
        ("bos_token_id", special.bos),
        *zip(END_KEYS, special.eos, strict=False),
        ("padding_token_id", special.pad),
        ("unknown_token_id", special.unk),
    ]
    keys: dict[str, Value] = {
        f"tokenizer.ggml.{name}": Scalar(Kind.UINT32, number)
        for name, number in numbers
        if number is not None
    }
    keys["tokenizer.ggml.add_bos_token"] = Scalar(Kind.BOOL, special.adds_bos)
    keys["tokenizer.ggml.add_eos_token"] = Scalar(Kind.BOOL, special.adds_eos)
    if special.chat_template is not None:
        keys[CHAT_TEMPLATE] = Scalar(Kind.STRING, special.chat_template)
    return keys
