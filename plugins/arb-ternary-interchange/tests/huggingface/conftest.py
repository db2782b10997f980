"""Folders that small decoders are exported to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from arb_ternary_interchange.huggingface.exporter import HfExporter
from arb_ternary_interchange.huggingface.importer import HfImporter
from arb_ternary_interchange.options import HfExportConfig, ImportConfig
from arb_ternary_interchange.protocols import ImportedModel
from arb_ternary_text.models.decoder import Decoder


@pytest.fixture
def export() -> Callable[..., Path]:
    """Export a decoder to a folder; keyword arguments are options of the exporter."""

    def write(model: Decoder, folder: Path, attached: Any = None, **options: Any) -> Path:
        metadata = {"name": "a-run", "step": 3, "model": {"name": "decoder"}, "versions": {}}
        if attached is not None:
            metadata["tokenizer"] = attached
        HfExporter(HfExportConfig(**options)).export(model, folder, metadata)
        return folder

    return write


@pytest.fixture
def cached() -> Callable[[Path, Path], Path]:
    """Lay a folder out as org/name in a cache of the hub, as huggingface_hub does, and return its
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
def divergence() -> Callable[[Tensor, Tensor], float]:
    """Return the divergence (Kullback-Leibler) of two logits in nats per token."""

    def measure(ours: Tensor, theirs: Tensor) -> float:
        p = ours.double().log_softmax(-1)
        q = theirs.double().log_softmax(-1)
        return float((p.exp() * (p - q)).sum(-1).mean())

    return measure


@pytest.fixture
def eager() -> Iterator[None]:
    """Switch compilation off: transformers compiles its BitNet linears, for minutes."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="session")
def load(built: Callable[..., Decoder]) -> Callable[..., tuple[Decoder, ImportedModel]]:
    """Import a folder and return the filled model and what the importer has read. ``changes`` are
    made to the model's options; keyword arguments are options of the importer.
    """

    def read(path: Path, changes: Any = None, **options: Any) -> tuple[Decoder, ImportedModel]:
        found = HfImporter(ImportConfig(**options)).load(path)
        return built(found, **(changes or {})), found

    return read
