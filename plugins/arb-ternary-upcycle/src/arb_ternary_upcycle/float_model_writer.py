"""Writes a float decoder to disk, block by block, so that a killed phase goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from arb_ternary.config.fields import to_plain
from arb_ternary.errors import ArbError, ComponentError
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_train.directory import write_json
from arb_ternary_train.durable import flush, replacing
from arb_ternary_train.safetensors_file import write_safetensors
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

#: What is being written, from before the first file on.
PLAN_FILE: Final = "plan.json"
#: Bytes that are hashed at a time.
_PIECE: Final = 1 << 22


class FloatModelWriter:
    """Writes the files of a :class:`~arb_ternary_upcycle.float_model.FloatModel`, each whole or not
    at all.

    What an earlier writer of the same plan has written stays, and is listed by
    :meth:`written_blocks`; files of another plan are removed.

    Args:
        path: the folder; it is made.
        config: options of the decoder; see ``float_config``.
        vocabulary_size: rows of the embedding.
        tokenizer: ``to_json`` of the tokenizer, or None.
        dtype: what float tensors are rounded to.
        origin: what the numbers are made from, plain JSON: a part of the plan, beside all of the
            above.
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
        path.mkdir(parents=True, exist_ok=True)
        plan = {**self._content, "origin": dict(origin or {})}
        if self._planned() != json.loads(json.dumps(plan)):
            for file in (MODEL_FILE, PLAN_FILE, ENDS_FILE):
                (path / file).unlink(missing_ok=True)
            for stale in path.glob("block-*.safetensors"):
                stale.unlink()
            write_json(path / PLAN_FILE, plan)

    @property
    def finished(self) -> bool:
        """Whether the model is complete."""
        return (self.path / MODEL_FILE).is_file()

    def written_blocks(self) -> frozenset[int]:
        """Numbers of the blocks that are on disk."""
        return frozenset(
            each for each in range(self.config.layers) if (self.path / block_file(each)).is_file()
        )

    @property
    def wrote_ends(self) -> bool:
        """Whether embedding, final norm and head are on disk."""
        return (self.path / ENDS_FILE).is_file()

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
        """Make the folder complete, and open it.

        Raises:
            ComponentError: a file has not been written.
        """
        files = [ENDS_FILE, *(block_file(number) for number in range(self.config.layers))]
        absent = [name for name in files if not (self.path / name).is_file()]
        if absent:
            raise ComponentError(f"{self.path}: {', '.join(absent[:3])} not written yet")
        if not self.finished:
            hasher = hashlib.sha256(json.dumps(self._content, sort_keys=True).encode())
            for name in files:
                hasher.update(_digest(self.path / name))
            write_json(self.path / MODEL_FILE, {**self._content, "digest": hasher.hexdigest()})
            flush(self.path)
        return FloatModel.open(self.path)

    def reopen(self) -> None:
        """Make the folder incomplete again; its files stay."""
        (self.path / MODEL_FILE).unlink(missing_ok=True)

    def _planned(self) -> Any:
        try:
            return json.loads((self.path / PLAN_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ArbError(
                f"{self.path / PLAN_FILE}: cannot be read: {error}", "Remove the folder."
            ) from error

    def _write(
        self, name: str, tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
    ) -> None:
        given = {key: (value.shape, value.is_floating_point()) for key, value in tensors.items()}
        expected = {key: (value.shape, value.is_floating_point()) for key, value in wanted.items()}
        if given != expected:
            wrong = sorted(
                key for key in given.keys() | expected.keys() if given.get(key) != expected.get(key)
            )
            raise ComponentError(
                f"{self.path / name}: {', '.join(wrong[:3])} are not as the decoder has them"
            )
        converted = {
            key: value.to(self._dtype if value.is_floating_point() else wanted[key].dtype)
            for key, value in tensors.items()
        }
        try:
            with replacing(self.path / name) as new:
                write_safetensors(new, converted, "")
            flush(self.path)
        except OSError as error:
            raise ArbError(f"{self.path / name}: cannot be written: {error}") from error


def _digest(path: Path) -> bytes:
    hasher = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            hasher.update(piece)
    return hasher.digest()
