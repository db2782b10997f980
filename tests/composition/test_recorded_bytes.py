"""Runs with ``exact: true`` end with the bytes that were recorded, on the backends that `auto` takes on a CPU.

The hashes are of the checkpoints that version 0.1.0 wrote before training, text and votes became distributions of
their own; those of ``exact``, whose steps have two micro-batches, of the first ones in which the votes of a step are
summed. They change when the arithmetic does, or the names of stored tensors: both need a line in CHANGELOG.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from arb_ternary.backends.select import candidates, reset_backends
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train

CONFIGS = Path(__file__).parent / "exact"
RECORDED = {
    "exact": {
        "model.safetensors": "b2c55c421f379a1368f108944a3242abd07f85669fc4dd3dddb9ae46c0d9060a",
        "state.safetensors": "bdd1957773eb4f0605b936268324a01d63fc5fb9a5f6feb8b333ad877b96a27c",
    },
    "exact_pure": {
        "model.safetensors": "6d516046388e46d569450dd0569430856e25f729666ca691d40be2a229479ac5",
        "state.safetensors": "3b254f9a5391cd3512219ab5603f582d303ff355d3416c4d5e8f0735cca70fc2",
    },
}


@pytest.fixture(autouse=True)
def _backends_are_forgotten() -> Iterator[None]:
    yield
    reset_backends()


# Each config and each backend once; the other two combinations are slow.
@pytest.mark.parametrize(
    ("config", "backend"),
    [
        ("exact", "cpu"),
        ("exact_pure", "torch"),
        pytest.param("exact", "torch", marks=pytest.mark.slow),
        pytest.param("exact_pure", "cpu", marks=pytest.mark.slow),
    ],
)
def test_an_exact_run_ends_with_the_recorded_bytes(config: str, backend: str, tmp_path: Path) -> None:
    if backend not in [each.name for each in candidates() if each.usable]:
        pytest.skip("not installed here")
    request = RunRequest(directory=tmp_path / "run", backend=backend, reporter=Silent)
    train(load_config(CONFIGS / f"{config}.yaml").config, request)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000060"
    for name, recorded in RECORDED[config].items():
        assert hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() == recorded, name
