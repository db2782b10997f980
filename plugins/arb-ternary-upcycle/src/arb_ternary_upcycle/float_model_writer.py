"""Writes a float decoder to disk block by block, so that a killed phase continues where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from arb_ternary.config.fields import to_plain
from arb_ternary.errors import ComponentError
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_upcycle.float_model import (
    DTYPES,
    ENDS_FILE,
    FORMAT,
    MODEL_FILE,
    VERSION,
    FloatModel,
    block_file,
    block_outline,
    ends_outline,
)
from arb_ternary_upcycle.stage_options import FloatDtype
from arb_ternary_upcycle.store import Store


class FloatModelWriter:
    """Writes the files of a :class:`~arb_ternary_upcycle.float_model.FloatModel`.

    Files that an earlier writer with the same arguments has written are kept; see
    :meth:`written_blocks`.

    Args:
        path: the folder; it is created.
        config: options of the decoder; see ``float_config``.
        vocabulary_size: rows of the embedding.
        tokenizer: ``to_json`` of the tokenizer, or None.
        dtype: number format of float tensors in the files.
        origin: what the weights are made from, plain JSON.
    """

    def __init__(
        self,
        path: Path,
        config: DecoderConfig,
        vocabulary_size: int,
        tokenizer: Mapping[str, Any] | None,
        dtype: FloatDtype = "float32",
        *,
        origin: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.config = config
        self._dtype = DTYPES[dtype]
        self._content = {
            "format": FORMAT,
            "version": VERSION,
            "decoder": to_plain(config),
            "vocabulary_size": vocabulary_size,
            "tokenizer": None if tokenizer is None else dict(tokenizer),
            "dtype": dtype,
        }
        self._ends = ends_outline(config, vocabulary_size)
        self._block = block_outline(config)
        self._store = Store(path, {**self._content, "origin": dict(origin or {})})

    @property
    def finished(self) -> bool:
        """Whether the model is complete."""
        return MODEL_FILE in self._store

    @property
    def wrote_ends(self) -> bool:
        """Whether embedding, final norm and head are on disk."""
        return ENDS_FILE in self._store

    def written_blocks(self) -> frozenset[int]:
        """Return the numbers of the blocks that are on disk."""
        return frozenset(
            number for number in range(self.config.layers) if block_file(number) in self._store
        )

    def write_ends(self, tensors: Mapping[str, Tensor]) -> None:
        """Write ``embedding``, ``final_norm`` and, unless tied, ``head``.

        Raises:
            ComponentError: names or shapes are not those of the decoder.
        """
        self._write(ENDS_FILE, tensors, self._ends)

    def write_block(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Write a block, its tensors by their names inside it (``attention.query``, ...).

        Raises:
            ComponentError: names or shapes are not those of the decoder.
        """
        self._write(block_file(number), tensors, self._block)

    def finish(self) -> FloatModel:
        """Mark the folder as complete, and open the model.

        Raises:
            ComponentError: a file has not been written.
        """
        files = [ENDS_FILE] + [block_file(number) for number in range(self.config.layers)]
        absent = [name for name in files if name not in self._store]
        if absent:
            raise ComponentError(f"{self.path}: not written yet: {', '.join(absent[:3])}")
        if not self.finished:
            hasher = hashlib.sha256(json.dumps(self._content, sort_keys=True).encode())
            for name in files:
                with (self.path / name).open("rb") as file:
                    hasher.update(hashlib.file_digest(file, "sha256").digest())
            self._store.write_json(MODEL_FILE, {**self._content, "digest": hasher.hexdigest()})
        return FloatModel.open(self.path)

    def reopen(self) -> None:
        """Mark the folder as incomplete again; its other files stay."""
        self._store.delete(MODEL_FILE)

    def _write(
        self, name: str, tensors: Mapping[str, Tensor], outlines: Mapping[str, Tensor]
    ) -> None:
        given = {key: _kind(value) for key, value in tensors.items()}
        expected = {key: _kind(value) for key, value in outlines.items()}
        if given != expected:
            wrong = sorted({key for key, _ in given.items() ^ expected.items()})
            names = ", ".join(wrong[:3])
            raise ComponentError(f"{self.path / name}: not as in the decoder: {names}")
        converted = {}
        for key, value in tensors.items():
            dtype = self._dtype if value.is_floating_point() else outlines[key].dtype
            converted[key] = value.to(dtype)
        self._store.write_tensors(name, converted)


def _kind(tensor: Tensor) -> tuple[tuple[int, ...], bool]:
    return tuple(tensor.shape), tensor.is_floating_point()
