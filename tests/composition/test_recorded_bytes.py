"""Runs with ``exact: true`` end with the bytes that were recorded, on the backends that `auto` takes on a CPU.

The hashes are of the checkpoints that version 0.1.0 wrote before training, text and votes became distributions of
their own. They change when the arithmetic does, or the names of stored tensors: both need a line in CHANGELOG.md.
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
        "model.safetensors": "b076e8c97d1669927b9c4266e639cdb2f67ef9106af8d377ddfe14e4535dcd19",
        "state.safetensors": "90446dce16c606f8a22fb13fe822851b8e34c79b55e1de39f10e131a45c13971",
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


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("config", RECORDED)
def test_an_exact_run_ends_with_the_recorded_bytes(config: str, backend: str, tmp_path: Path) -> None:
    if backend not in [each.name for each in candidates() if each.usable]:
        pytest.skip("not installed here")
    request = RunRequest(directory=tmp_path / "run", backend=backend, reporter=Silent)
    train(load_config(CONFIGS / f"{config}.yaml").config, request)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000060"
    for name, recorded in RECORDED[config].items():
        assert hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() == recorded, name
