"""SIGKILL in the phases ``blockwise`` and ``global``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HELPER = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)
import arb_ternary_text.models.decoder
import arb_ternary_train.optim.split
import arb_ternary_train.optim.adamw
import arb_ternary_votes.scaled_votes
import arb_ternary_upcycle.blockwise
import arb_ternary_upcycle.global_phase
from pathlib import Path
from arb_ternary_train.context import TrainingContext
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_upcycle import global_phase
global_phase.MOST = 1e9
record_step = TrainingContext.record_step

def run(order):
    def recorded(self, *arguments, **options):
        if self.step + 1 == order["at"]:
            os.kill(os.getpid(), signal.SIGKILL)
        record_step(self, *arguments, **options)

    TrainingContext.record_step = recorded
    config = load_config(Path(order["config"]), order["overrides"]).config
    train(config, RunRequest(directory=Path(order["directory"]), resume="auto", reporter=Silent))

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            run(json.loads(line))
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")]


def test_resume_after_sigkill_is_bitwise(
    tiny: Any, files_in: Callable[..., dict[str, bytes]]
) -> None:
    options = {
        "cache_teacher_outputs": "true",
        "cache_memory": 3000,
        "gradient_accumulation_steps": 2,
    }
    blockwise = tiny.phase("blockwise", steps=5, blockwise_autotune_enabled="true", **options)
    both = (
        blockwise[:-1]
        + ", "
        + tiny.phase("global", steps=5, kd_weight=0.5).removeprefix("phases=[")
    )
    overrides = [both, "checkpoint={every: 3, keep: 40}"]
    process = subprocess.Popen(
        [sys.executable, "-c", HELPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def run(name: str, at: int) -> int:
        assert process.stdin is not None
        assert process.stdout is not None
        order = {
            "config": str(tiny.file),
            "overrides": overrides,
            "directory": str(tiny.folder / name),
            "at": at,
        }
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    try:
        assert run("whole", 0) == 0
        # In the first block, in the second, after its last checkpoint, in the global phase; then to
        # the end.
        for at in (5, 8, 10, 15):
            assert run("killed", at) == signal.SIGKILL
            if at == 8:
                assert list((tiny.folder / "killed" / "cache").glob("*/*/*/*.safetensors"))
        assert run("killed", 0) == 0
    finally:
        process.communicate(timeout=60)
    whole, killed = (files_in(Path(tiny.folder / name)) for name in ("whole", "killed"))
    assert whole == killed
    assert len([name for name in whole if name.endswith("model.safetensors")]) >= 5
