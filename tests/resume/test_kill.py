"""SIGKILL at any moment, resume, and end with the bytes of the run that was never killed.

The runs are children of a helper that has imported everything, so that a run starts in a fraction
of a second and most kills hit training and checkpoints rather than the start of Python.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import frozen

CONFIG = """
name: killed
data: {{name: text, path: {text}, tokenizer: characters}}
model: {{name: decoder, width: 16, layers: 1, heads: 2, max_length: 8, group_size: 32,
    float_parts: [norms]}}
optimizer: {{name: split, ternary: {{name: sign_votes, accum_threshold: 2}}, float: adamw}}
checkpoint: {{every: 3, keep: 2}}
trackers: []
phases:
  - {{name: standard, steps: {first}, batch_size: 2, block_size: 8, eval_every: 8, eval_batches: 1,
      num_workers: 1}}
  - {{name: standard, steps: {second}, batch_size: 2, block_size: 8, gradient_accumulation_steps: 3,
      eval_every: 0}}
"""

HELPER = """
import json, os, signal, sys
import torch
import torch._dynamo  # torch's AdamW imports it, which takes longer than a whole run
torch.set_num_threads(1)
import arb_ternary_text.models.decoder, arb_ternary_train.optim.split
import arb_ternary_train.optim.adamw, arb_ternary_train.standard
from pathlib import Path
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train

def run(order):
    seen = 0
    def faults(point):
        nonlocal seen
        seen += 1
        if seen == order["point"]:
            os.kill(os.getpid(), signal.SIGKILL)
    train(
        load_config(order["config"]).config,
        RunRequest(directory=Path(order["directory"]), resume="auto", reporter=Silent,
            faults=faults),
    )

print("ready", flush=True)
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
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


class Helper:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        generator = random.Random(0)
        words = ["to", "be", "or", "not", "that", "is", "the", "question"]
        (folder / "text.txt").write_text(" ".join(generator.choice(words) for _ in range(900)))
        for name, first, second in (("long", 36, 12), ("short", 9, 6)):
            config = CONFIG.format(text=folder / "text.txt", first=first, second=second)
            (folder / f"{name}.yaml").write_text(config)
        self.process = subprocess.Popen(
            [sys.executable, "-c", HELPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._line() == "ready"

    def run(
        self, config: str, directory: Path, *, after: float | None = None, point: int | None = None
    ) -> int:
        """Start or resume a run; kill it after this time, or at this point of the writer.

        Returns its wait status.
        """
        order = {
            "config": str(self.folder / f"{config}.yaml"),
            "directory": str(directory),
            "point": point,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        child = int(self._line())
        if after is not None:
            time.sleep(after)
            # The helper has not read the child's status while the child lives; a pid is not used
            # again before that.
            os.kill(child, signal.SIGKILL)
        return int(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="module")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Helper]:
    made = Helper(tmp_path_factory.mktemp("kill"))
    yield made
    made.close()


@frozen
class Whole:
    """A run that is not killed: its duration and its files."""

    seconds: float
    files: dict[str, bytes]


@pytest.fixture(scope="module")
def whole(helper: Helper) -> dict[str, Whole]:
    found = {}
    for config in ("long", "short"):
        started = time.monotonic()
        assert helper.run(config, helper.folder / config) == 0
        found[config] = Whole(time.monotonic() - started, files_in(helper.folder / config))
    return found


def files_in(directory: Path) -> dict[str, bytes]:
    found = [directory / "metrics.jsonl", *directory.glob("checkpoints/**/*")]
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(found)
        if path.is_file()
    }


def killed(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def test_run_killed_twenty_times_ends_with_the_same_bytes(
    helper: Helper, whole: dict[str, Whole]
) -> None:
    generator = random.Random(time.time_ns())
    kills = finished = 0
    while kills < 20 or not finished:
        directory = helper.folder / f"random{finished}"
        # Long enough on average to get on by a few checkpoints; once there were enough kills, to
        # the end.
        after = generator.uniform(0.0, whole["long"].seconds / 2) if kills < 20 else None
        try:
            status = helper.run("long", directory, after=after)
        except ProcessLookupError:  # it had ended before
            status = int(helper._line())
        if killed(status):
            kills += 1
            continue
        assert status == 0
        assert files_in(directory) == whole["long"].files
        finished += 1
    assert kills >= 20


@pytest.mark.parametrize(
    ("save", "point"), [(1, 1), (1, 6), (1, 8), *((4, point) for point in range(1, 11))]
)
def test_run_killed_while_saving_ends_with_the_same_bytes(
    helper: Helper, whole: dict[str, Whole], save: int, point: int
) -> None:
    # A save passes nine points, and a tenth when it deletes an old one, which the third and later
    # ones do.
    before = {1: 0, 4: 9 + 9 + 10}[save]
    directory = helper.folder / f"writer{save}-{point}"
    assert killed(helper.run("short", directory, point=before + point))
    assert helper.run("short", directory) == 0
    assert files_in(directory) == whole["short"].files
