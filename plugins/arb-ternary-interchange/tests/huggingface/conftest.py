"""Small decoders, and folders that they are exported to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from arb_ternary_interchange.huggingface.exporter import HfExporter
from arb_ternary_interchange.options import HfExportConfig
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder

SIZES: dict[str, Any] = {
    "width": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "feed_forward": 96,
    "max_length": 32,
}


@pytest.fixture
def make_decoder() -> Callable[..., Decoder]:
    def make(vocabulary_size: int = 256, seed: int = 0, **options: Any) -> Decoder:
        torch.manual_seed(seed)
        return Decoder(DecoderConfig(**{**SIZES, **options}), vocabulary_size).eval()

    return make


@pytest.fixture
def export() -> Callable[..., Path]:
    def write(model: Decoder, folder: Path, attached: Any = None, **options: Any) -> Path:
        metadata = {"name": "a-run", "step": 3, "model": {"name": "decoder"}, "versions": {}}
        if attached is not None:
            metadata["tokenizer"] = attached
        HfExporter(HfExportConfig(**options)).export(model, folder, metadata)
        return folder

    return write


@pytest.fixture
def cached() -> Callable[[Path, Path], Path]:
    """Lays a folder out as org/name in a cache of the hub, as huggingface_hub does; returns its
    snapshot.
    """

    def lay_out(folder: Path, cache: Path, revision: str = "5" * 40) -> Path:
        model = cache / "models--org--name"
        snapshot = model / "snapshots" / revision
        for directory in (model / "blobs", model / "refs", snapshot):
            directory.mkdir(parents=True)
        (model / "refs" / "main").write_text(revision)
        for file in folder.iterdir():
            content = file.read_bytes()
            name = hashlib.sha256(content).hexdigest()
            (model / "blobs" / name).write_bytes(content)
            (snapshot / file.name).symlink_to(f"../../blobs/{name}")
        return snapshot

    return lay_out


@pytest.fixture
def as_float() -> Callable[[Decoder], Decoder]:
    """The same weights with activations that are not rounded."""

    def change(model: Decoder) -> Decoder:
        other = Decoder(evolve(model.config, activations="float"), model.vocabulary_size)
        other.load_state_dict(model.state_dict())
        return other.eval()

    return change


@pytest.fixture
def divergence() -> Callable[[Tensor, Tensor], float]:
    """Kullback-Leibler divergence of the second logits from the first, in nats a token."""

    def measure(ours: Tensor, theirs: Tensor) -> float:
        p = ours.double().log_softmax(-1)
        q = theirs.double().log_softmax(-1)
        return float((p.exp() * (p - q)).sum(-1).mean())

    return measure


@pytest.fixture
def eager() -> Iterator[None]:
    """Without compilation: transformers compiles its BitNet linears, for minutes."""
    with torch.compiler.set_stance("force_eager"):
        yield
