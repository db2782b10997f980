"""A file operation of one of two ranks fails: both end with a line, and go on to the same bytes."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.config.yaml_document import dump_yaml
from arb_test_support.file_faults import ERRORS

Compare = Callable[[Path, Path], None]
SHAPE = {"width": 16, "layers": 1, "heads": 2, "max_length": 8, "group_size": 32}
PHASE = {
    "name": "standard",
    "steps": 2,
    "batch_size": 1,
    "block_size": 8,
    "gradient_accumulation_steps": 2,
    "warmup_steps": 0,
    "eval_every": 0,
}


@pytest.mark.extended
@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_operation_of_a_rank_fails(
    rank: int, ranks: Any, text: Path, tmp_path: Path, same_files: Compare
) -> None:
    config = tmp_path / "config.yaml"
    settings = {
        "name": "faulty",
        "data": {"name": "text", "path": str(text), "tokenizer": "characters"},
        "model": {"name": "decoder", **SHAPE},
        "optimizer": {"name": "scaled_votes"},
        "ranks": {"checkpoints": "pieces"},
        "checkpoint": {"every": 1, "keep": 1},
        "trackers": [],
        "phases": [PHASE],
    }
    config.write_text(dump_yaml(settings))
    whole = tmp_path / "whole/run"
    operations = ranks.must(config, whole, size=2).operations[rank]
    # One operation of each kind in each folder.
    places: dict[tuple[str, str], int] = {}
    for number, (kind, path) in enumerate(operations):
        if kind != "open":
            folder = re.sub(r"\d+", "#", str(Path(path).parent))
            places.setdefault((kind, folder), number)

    problems = []
    for turn, number in enumerate(places.values()):
        kind, path = operations[number]
        fitting = [error for error in ERRORS if kind in ERRORS[error]]
        error = fitting[turn % len(fitting)]
        run = tmp_path / f"{number}/run"
        ended = ranks.run(config, run, size=2, fault=(rank, error, number), seconds=30)
        said = "".join(ended.said)
        good = set(ended.codes) == {0}
        named = os.strerror(error) in ended.said[rank] and set(ended.codes) == {1}
        if "Traceback" in said or not (good or named):
            where = f"{kind} {path} {errno.errorcode[error]}"
            problems.append(f"{where}: {ended.codes}\n{said}")
        ranks.must(config, run, size=2, resume="auto")
        (run / "metrics.before.jsonl").unlink(missing_ok=True)
        same_files(run, whole)
    assert not problems, "\n".join(problems)
