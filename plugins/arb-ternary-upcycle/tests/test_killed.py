"""SIGKILL in the phases that make stages and in ``projection``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.config.fields import to_plain
from arb_ternary.config.yaml_document import dump_yaml


def start(config: Path, folder: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "arb_ternary.cli.main",
        "train",
        str(config),
        "--run-dir",
        str(folder),
        "--resume",
    ]
    with config.with_name("errors.txt").open("wb") as errors:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the stages, the newest weights and the metrics, by path."""
    files = [
        file
        for file in (folder / "stages").rglob("*")
        if file.is_file() and not file.name.startswith(".")
    ]
    newest = (folder / "checkpoints/latest").read_text().strip()
    files.append(folder / "checkpoints" / newest / "model.safetensors")
    return {
        file.name if newest in file.parts else str(file.relative_to(folder)): file.read_bytes()
        for file in [*files, folder / "metrics.jsonl"]
    }


@pytest.mark.slow
def test_sigkill_in_every_stage_phase(
    tmp_path: Path, run_config: Callable[..., Any], save_model: Callable[..., Path]
) -> None:
    teacher = save_model(tmp_path / "teacher", num_hidden_layers=12)
    options: dict[str, Any] = {
        "architecture": None,
        "activation": "swiglu",
        "sub_norms": False,
        "layers": 12,
    }
    options |= {"attention": "decoupled", "sem_dim": 2, "geo_dim": 4, "rotary_dim": 8}
    phases = [
        {"name": "load_teacher", "teacher": str(teacher), "max_nll": 99.0},
        "fold_rotate",
        {"name": "surgery", "calibration_tokens": 1024, "block_size": 64},
        {
            "name": "projection",
            "calibration_tokens": 2048,
            "held_out_tokens": 256,
            "block_size": 64,
        },
    ]
    config = tmp_path / "config.yaml"
    config.write_text(dump_yaml(to_plain(run_config(*phases, **options))))
    whole = start(config, tmp_path / "whole")
    assert whole.wait() == 0, (tmp_path / "errors.txt").read_text()
    halves = dict.fromkeys(("teacher", "prepared", "surgery"), ".model.safetensors.writing")
    halves["projection"] = "block-00003.safetensors"
    for stage, half in halves.items():
        process = start(config, tmp_path / "cut")
        try:
            file = tmp_path / "cut/stages" / stage / half
            while not file.is_file():
                assert process.poll() is None, (tmp_path / "errors.txt").read_text()
                time.sleep(0.001)
            os.kill(process.pid, signal.SIGKILL)
        finally:
            process.wait()
        assert process.returncode == -signal.SIGKILL
        assert not (tmp_path / "cut/stages" / stage / "model.safetensors").exists()
    last = start(config, tmp_path / "cut")
    assert last.wait() == 0, (tmp_path / "errors.txt").read_text()
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
