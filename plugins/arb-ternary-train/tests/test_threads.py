"""``threads`` of a config: chosen, recorded, and kept by a resumed run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from arb_ternary import hookimpl
from arb_ternary.errors import ConfigError, Interrupted
from arb_ternary_train import build, threads
from arb_ternary_train.threads import fewest_as_fast, fitting_threads


def linears(*sizes: tuple[int, int]) -> nn.Module:
    return nn.ModuleList(nn.Linear(k, n, device="meta") for k, n in sizes)


@pytest.mark.parametrize(
    ("model", "tokens", "expected"),
    [
        (linears((128, 128), (128, 256)), 1024, 1),  # the demo: 2**24.6 multiplications a product
        (linears((1024, 1024)), 64, 2),  # 2**26 multiplications
        (linears((1024, 1024), (1024, 3072)), 256, 16),  # 2**29 on average
        (linears((4096, 4096)), 4096, 16),  # no more than there are
        (nn.Conv2d(3, 8, 3), 64, 16),  # no products to go by
    ],
)
def test_threads_grow_with_the_average_product(
    model: nn.Module, tokens: int, expected: int
) -> None:
    assert fitting_threads(model, tokens, 16) == expected


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ({8: 1.0, 4: 1.9}, 8),
        ({8: 1.0, 4: 1.05, 2: 1.9}, 4),  # a twentieth saved is not worth four threads
        ({8: 5.0, 4: 2.0, 2: 1.0, 1: 0.5}, 1),  # other processes want the cores
        ({3: 1.0, 1: 2.5}, 3),
    ],
)
def test_threads_that_save_next_to_nothing_are_given_up(
    measured: Mapping[int, float], expected: int
) -> None:
    assert fewest_as_fast(max(measured), measured.__getitem__) == expected


class Watcher:
    """Records torch's number of threads after each step; may ask the run to stop."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.seen: list[int] = []
        self.stop_after = stop_after

    @hookimpl
    def arb_step_end(self, context: Any, step: int) -> None:
        self.seen.append(torch.get_num_threads())
        if step == self.stop_after:
            context.request_stop("the test")


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend a machine of four cores on which the tiny model has work for all, untimed."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "_SHARE", 1)
    monkeypatch.setattr(threads, "_time_threads", lambda context, options, count: count - 1)
    torch.set_num_threads(4)


def observe(monkeypatch: pytest.MonkeyPatch, watcher: Watcher) -> Watcher:
    monkeypatch.setattr(
        build, "build_observers", lambda config: build.RunObservers({"watcher": watcher})
    )
    return watcher


@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize(
    ("override", "variable", "expected"),
    [
        ("threads=auto", None, 3),  # what fits, less what timing gives up
        ("deterministic=true", None, 4),  # what fits
        ("threads=2", None, 2),
        ("threads=2", "4", 2),
        ("threads=auto", "4", 4),
    ],
)
def test_run_uses_the_recorded_number_of_threads(
    override: str, variable: str | None, expected: int, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    watcher = observe(monkeypatch, Watcher())
    run, _ = tiny.run("run", override)
    assert watcher.seen == [expected] * 8
    assert run.record()["threads"] == {"loops": {"phase 0": expected}, "last": expected}
    assert f"phase 0: {expected} of 4 threads" in run.log_file.read_text()
    assert torch.get_num_threads() == 4


@pytest.mark.usefixtures("cores")
def test_a_resumed_run_keeps_the_number_that_was_chosen(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe(monkeypatch, Watcher(stop_after=5))
    with pytest.raises(Interrupted):
        tiny.run("run")
    monkeypatch.setattr(
        threads, "_time_threads", lambda context, options, count: pytest.fail("it was timed again")
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    torch.set_num_threads(2)
    watcher = observe(monkeypatch, Watcher(stop_after=6))
    with pytest.raises(Interrupted):
        tiny.run("run", resume="auto")
    assert watcher.seen == [3]
    watcher = observe(monkeypatch, Watcher())
    run, _ = tiny.run("run", "threads=1", resume="auto")
    assert watcher.seen == [1, 1], (
        "a number in the config goes before the one that was written down"
    )
    assert run.record()["threads"] == {"loops": {"phase 0": 1}, "last": 1}


def test_timed_passes_leave_no_trace_in_the_run(
    tiny: Any, files_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = tiny.run("plain")
    counted: list[int] = []
    evaluate = threads.evaluate

    def counting(*args: Any, **options: Any) -> Any:
        counted.append(torch.get_num_threads())
        return evaluate(*args, **options)

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "_SHARE", 1)
    monkeypatch.setattr(threads, "evaluate", counting)
    monkeypatch.setattr(
        threads, "fewest_as_fast", lambda count, seconds: (seconds(count), seconds(1), 1)[2]
    )
    torch.set_num_threads(2)
    timed, _ = tiny.run("timed")
    assert counted == [2] * 4 + [1] * 4
    assert files_in(timed.path) == files_in(plain.path)


def test_a_number_of_threads_that_is_none_is_refused(tiny: Any) -> None:
    for value in ("0", "some", "1.5"):
        with pytest.raises(ConfigError, match="threads"):
            tiny.config(f"threads={value}")


@pytest.mark.skipif(
    "OpenMP" not in torch.__config__.parallel_info(), reason="torch has threads of another kind"
)
@pytest.mark.parametrize("policy", [None, pytest.param("active", marks=pytest.mark.extended)])
def test_waiting_threads_sleep_by_default(
    policy: str | None,
) -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))
    }
    environment |= {"OMP_DISPLAY_ENV": "true"} | (
        {} if policy is None else {"OMP_WAIT_POLICY": policy}
    )
    command = [sys.executable, "-m", "arb_ternary.cli.main", "eval", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    shown = [line for line in done.stderr.splitlines() if "OMP_WAIT_POLICY" in line]
    assert shown
    assert all(("PASSIVE" if policy is None else "ACTIVE") in line for line in shown)
