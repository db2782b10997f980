"""``exact: true`` gives the same bytes on two backends, with one thread and with two.

The models are those of ``arb_test_support.kinds_of_data``, one for each kind of data.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.backends.select import candidates, reset_backends
from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train
from arb_test_support.kinds_of_data import KINDS_OF_DATA, KindOfData

STEPS = 3
MODELS = [
    pytest.param(kind, model, id=f"{name}-{model['name']}")
    for name, kind in KINDS_OF_DATA.items()
    for model in kind.models
]


@pytest.fixture(autouse=True)
def _backends_are_forgotten() -> Iterator[None]:
    yield
    reset_backends()


def trained(folder: Path, kind: KindOfData, model: Any, backend: str, threads: int) -> list[bytes]:
    """Return the bytes of the last checkpoint."""
    text = folder / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 30)
    config = {
        "name": "exact",
        "exact": True,
        "threads": threads,
        "data": {
            key: str(text) if value == "{text}" else value for key, value in kind.data.items()
        },
        "model": dict(model),
        **({"masking": {"name": kind.masking[0]}} if kind.masking else {}),
        "optimizer": {"name": "sign_votes", "accum_threshold": 2},
        "checkpoint": {"every": STEPS, "keep": 1},
        "checks": ["pure"],
        "phases": [
            {"name": "standard", "steps": STEPS, "eval_every": 0, **kind.phase, "batch_size": 16}
        ],
    }
    path = folder / f"{backend}.yaml"
    path.write_text(dump_yaml(config))
    directory = folder / backend
    train(
        load_config(path).config, RunRequest(directory=directory, backend=backend, reporter=Silent)
    )
    checkpoint = directory / "checkpoints" / f"step-{STEPS:08d}"
    return [(checkpoint / name).read_bytes() for name in ("model.safetensors", "state.safetensors")]


@pytest.mark.parametrize(("kind", "model"), MODELS)
def test_exact_run_has_the_same_bytes_on_both_cpu_backends(
    kind: KindOfData, model: Any, tmp_path: Path
) -> None:
    if "cpu" not in [each.name for each in candidates() if each.usable]:
        pytest.skip("the backend cpu is not installed here")
    assert trained(tmp_path, kind, model, "torch", 1) == trained(tmp_path, kind, model, "cpu", 2)
