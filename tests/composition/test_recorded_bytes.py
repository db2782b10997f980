"""Runs with ``exact: true`` end with the recorded bytes, on the backends of a CPU.

The hashes are those of the checkpoints that version 0.1.0 wrote before training, text and votes
became separate distributions. Those of ``exact``, whose steps have two micro-batches, are of the
first version that sums the votes of a step. They change with the arithmetic and with the names of
stored tensors; both need a line in CHANGELOG.md. They were recorded with the AVX2 code of torch and
MKL, which sum floats in another order with AVX-512: the runs are children that use AVX2 only.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from arb_ternary.backends.select import candidates, reset_backends

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


AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "OMP_NUM_THREADS": "1"}
#: Trains configs, each with the backend that follows it, in folders of the config's name.
CHILD = """
import sys
from pathlib import Path
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train

for config, backend in zip(sys.argv[1::2], sys.argv[2::2]):
    train(load_config(config).config, RunRequest(directory=Path(Path(config).stem), backend=backend,
        reporter=Silent))
"""


# Each config and each backend once; the other two combinations are slow.
@pytest.mark.parametrize(
    "runs",
    [
        pytest.param({"exact": "cpu", "exact_pure": "torch"}, id="each once"),
        pytest.param(
            {"exact": "torch", "exact_pure": "cpu"}, id="the others", marks=pytest.mark.slow
        ),
    ],
)
def test_exact_runs_end_with_the_recorded_bytes(runs: dict[str, str], tmp_path: Path) -> None:
    usable = [each.name for each in candidates() if each.usable]
    here = {config: backend for config, backend in runs.items() if backend in usable}
    arguments = [
        text
        for config, backend in here.items()
        for text in (str(CONFIGS / f"{config}.yaml"), backend)
    ]
    subprocess.run(
        [sys.executable, "-c", CHILD, *arguments],
        check=True,
        cwd=tmp_path,
        env={**os.environ, **AVX2},
    )
    for config in here:
        checkpoint = tmp_path / config / "checkpoints" / "step-00000060"
        for name, recorded in RECORDED[config].items():
            assert hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() == recorded, (
                f"{config}: {name}"
            )
