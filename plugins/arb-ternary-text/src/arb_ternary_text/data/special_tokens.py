"""Tokens that are no text: beginnings and ends, and how a model writes conversations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from arb_ternary.errors import DataError


def _is_id(value: object) -> bool:
    return type(value) is int and value >= 0


@attrs.frozen(kw_only=True)
class SpecialTokens:
    """The special tokens of a model and its chat template; a base model may have none of them.

    Attributes:
        bos: id of the beginning of a text.
        eos: ids that end a text or an answer. The first one ends training documents.
        pad: id of padding.
        unk: id of text that the tokenizer has no token for.
        adds_bos: whether every text that the model reads begins with ``bos``.
        adds_eos: whether the model's tokenizer ends every text with the first of ``eos``.
        chat_template: Jinja template that writes a conversation as text.
    """

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    unk: int | None = None
    adds_bos: bool = False
    adds_eos: bool = False
    chat_template: str | None = attrs.field(
        default=None, repr=lambda text: "None" if text is None else f"<{len(text)} characters>"
    )

    @property
    def prefix(self) -> list[int]:
        """The ids that every text of the model begins with: BOS, or none."""
        return [self.bos] if self.adds_bos and self.bos is not None else []

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON can hold it."""
        return {**attrs.asdict(self), "eos": list(self.eos)}

    @classmethod
    def from_json(cls, state: object, vocabulary_size: int) -> SpecialTokens:
        """Return the record of which ``state`` is the JSON.

        Raises:
            DataError: ``state`` is not such a record, or an id is outside the vocabulary.
        """
        names = [field.name for field in attrs.fields(cls)]
        if not isinstance(state, Mapping) or sorted(state) != sorted(names):
            raise DataError(f"tokenizer.json: special tokens are an object of {', '.join(names)}")
        eos = state["eos"]
        if not isinstance(eos, list | tuple):
            raise DataError("tokenizer.json: special tokens: eos must be a list of ids")
        for name in ("adds_bos", "adds_eos"):
            if type(state[name]) is not bool:
                raise DataError(f"tokenizer.json: special tokens: {name} must be true or false")
        template = state["chat_template"]
        if not (template is None or isinstance(template, str)):
            raise DataError("tokenizer.json: special tokens: chat_template must be text")
        named = [(name, state[name]) for name in ("bos", "pad", "unk") if state[name] is not None]
        for name, value in (*named, *(("eos", each) for each in eos)):
            if not _is_id(value) or value >= vocabulary_size:
                raise DataError(
                    f"tokenizer.json: special tokens: {name} must be an id below "
                    f"{vocabulary_size}, not {value!r}"
                )
        return cls(**{**state, "eos": tuple(eos)})


NO_SPECIAL_TOKENS: Final = SpecialTokens()
