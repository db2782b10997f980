"""Reads a teacher: a run of this program, or anything that an importer recognises."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from arb_ternary.backends.select import request_backend, select, use_backend
from arb_ternary.errors import ConfigError
from arb_ternary_interchange.decoder.weights import TernaryWeight, exported_weights
from arb_ternary_text.models.config import FLOAT_PARTS, DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.checkpoint_format import tensor_digest
from arb_ternary_train.model_source import read_source
from arb_ternary_train.restore import load_run
from arb_ternary_train.seeding import preserved_global_rng
from arb_ternary_upcycle.float_model import DTYPES, float_config
from arb_ternary_upcycle.stage_options import FloatDtype


@frozen(eq=False)
class PretrainedModel:
    """A pretrained model in memory.

    Attributes:
        model: the decoder, in evaluation mode.
        tokenizer: ``to_json`` of its tokenizer; None if none came with it.
        notes: what could not be mapped or was rounded, one sentence each.
    """

    model: Decoder
    tokenizer: Mapping[str, Any] | None
    notes: tuple[str, ...] = ()

    @property
    def config(self) -> DecoderConfig:
        """Options of the float decoder with its weights."""
        return float_config(self.model.config)

    def digest(self) -> str:
        """Return SHA-256 in hexadecimal of the weights."""
        found = hashlib.sha256()
        for name, value in self.model.state_dict().items():
            found.update(f"{name} {tensor_digest(value)}".encode())
        return found.hexdigest()

    def ends(self) -> dict[str, Tensor]:
        """Return embedding, final norm and head, float32."""
        return {name: value for name, value in self._weights() if not name.startswith("blocks.")}

    def blocks(self) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors of each block, by their names inside it, float32."""
        inside = (each for each in self._weights() if each[0].startswith("blocks."))
        for number, tensors in groupby(inside, lambda each: each[0].split(".")[1]):
            yield {name.removeprefix(f"blocks.{number}."): value for name, value in tensors}

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in exported_weights(self.model):
            yield name, value.dense() if isinstance(value, TernaryWeight) else value


def read_teacher(source: str, dtype: FloatDtype) -> PretrainedModel:
    """Read a teacher. No code that comes with it is run, and the global generators do not change.

    Args:
        source: a run directory or checkpoint, or what an importer takes: a folder, a file,
            ``hf://org/name``.
        dtype: number format that its weights will be kept in; with bfloat16, reading takes half
            the memory.

    Raises:
        ConfigError: it is not a decoder, or has parts that a float decoder does not have.
        ArbError: see ``read_source`` and ``load_run``.
    """
    with preserved_global_rng(torch.device("cpu")), torch.no_grad():
        found = read_source(source)
        if found.build is None:
            model = load_run(Path(source), device="cpu").model
        else:
            pure_float = set(found.model.get("float_parts", ())) == set(FLOAT_PARTS)
            made_in = DTYPES[dtype] if pure_float else torch.float32
            backend = select(request_backend(device="cpu"))
            with use_backend(backend.name), _default_dtype(made_in):
                model = found.build()
    return PretrainedModel(_decoder(model, source), found.attachments.get("tokenizer"), found.notes)


def _decoder(model: nn.Module, source: str) -> Decoder:
    if not isinstance(model, Decoder):
        raise ConfigError(f"{source}: a {type(model).__name__}; a teacher is a `decoder`")
    return model


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype within the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
