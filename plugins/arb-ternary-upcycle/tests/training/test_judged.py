"""The phases that train end no farther from the teacher than they began, at rates too high."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from arb_ternary.errors import Interrupted
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_train.restore import load_run
from arb_ternary_upcycle import stages

#: A rate of votes at which training harms a student whose weights are rounded.
TOO_HIGH = "optimizer.ternary.lr=0.2"


@pytest.fixture
def projected(tiny: Any) -> Any:
    """A run that has projected the teacher."""
    source = tiny.folder / "source"
    (source / "stages").mkdir(parents=True)
    (source / "stages" / "teacher").symlink_to(tiny.folder / "teacher")
    phases = "phases=[{name: projection, block_size: 16, calibration_tokens: 1024}]"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "lineage", lambda _: iter([source]))
        run, _ = tiny.run("projected", phases)
    return run


@torch.no_grad()
def distances(tiny: Any, run: Any) -> tuple[list[float], float]:
    """Return the L1 of each block's output to the teacher's, and the divergence from it.

    They are means over half of the held-out text, in float64.
    """
    return distances_of(tiny, load_run(run.path).model.eval())


@torch.no_grad()
def distances_of(tiny: Any, student: Any) -> tuple[list[float], float]:
    """Return the distances of a student, as :func:`distances` does."""
    data = tiny.config().data.build()
    inputs = torch.cat([batch.data[:, :-1] for batch in data.held_out(4, 16, 3)])

    def streams(model: Any) -> list[Tensor]:
        x = model.embed(inputs)
        found = []
        for number in range(2):
            x = model.run_blocks(x, number, number + 1)
            found.append(x.double())
        return found

    pairs = zip(streams(student), streams(tiny.teacher), strict=True)
    logits = student(inputs).double().flatten(0, 1)
    wanted = tiny.teacher(inputs).double().flatten(0, 1)
    kl = F.kl_div(logits.log_softmax(-1), wanted.softmax(-1), reduction="batchmean")
    return [float((mine - its).abs().mean()) for mine, its in pairs], float(kl)


def records(run: Any) -> list[dict[str, Any]]:
    lines = map(json.loads, run.metrics_file.read_text().splitlines())
    return [line for line in lines if line["event"] == "held_out"]


def test_no_block_ends_farther_than_its_projection(tiny: Any, projected: Any) -> None:
    start, _ = distances(tiny, projected)
    phase = tiny.phase("blockwise", steps=50, lr=0.001, probe_tokens=512)
    judged, _ = tiny.run("judged", phase, TOO_HIGH, init_from=projected.path)
    notes = list(tiny.notes)
    end, _ = distances(tiny, judged)
    assert end[0] <= start[0], (start, end)
    # The second block is trained on what the first one gives once it has been trained.
    half_trained = load_run(projected.path).model.eval()
    half_trained.blocks[0] = load_run(judged.path).model.eval().blocks[0]
    before, _ = distances_of(tiny, half_trained)
    assert end[1] <= before[1], (before, end)
    assert [record["of"] for record in records(judged)] == ["block 1", "block 2"]
    assert all(record["last"] <= record["first"] for record in records(judged))
    assert any(
        "block 1: held-out L1 has grown by step 5; back to the state after step 0, votes at 0.25 "
        "and floats at 0.5 of" in note
        for note in notes
    )
    # Votes that have turned no trit are dropped.
    before, after = (
        dict(ternary_modules(load_run(run.path, accumulators=True).model))
        for run in (projected, judged)
    )
    for name, module in before.items():
        same = module.trits() == after[name].trits()
        assert torch.equal(module.logical_votes()[same], after[name].logical_votes()[same])
    # The same steps without a probe do harm.
    unjudged = phase.replace("probe_tokens: 512", "probe_tokens: 0")
    harmed, _ = tiny.run("harmed", unjudged, TOO_HIGH, init_from=projected.path)
    worse, _ = distances(tiny, harmed)
    assert all(after > before for before, after in zip(start, worse, strict=True))
    assert records(harmed) == []


def test_global_ends_no_farther_than_it_began(tiny: Any, projected: Any) -> None:
    _, start = distances(tiny, projected)
    options = {"steps": 10, "kd_weight": 1.0, "force": "true", "lr": 0.0001}
    phase = tiny.phase("global", probe_tokens=512, **options)
    judged, _ = tiny.run("judged", phase, TOO_HIGH, init_from=projected.path)
    _, end = distances(tiny, judged)
    assert end <= start
    [record] = records(judged)
    assert record["step"] == 10
    assert record["first"] == pytest.approx(start, rel=0.2)
    assert record["last"] <= record["first"]
    assert any("global: held-out divergence has grown by step 5" in note for note in tiny.notes)
    harmed, _ = tiny.run(
        "harmed",
        tiny.phase("global", probe_tokens=0, **options),
        TOO_HIGH,
        init_from=projected.path,
    )
    assert distances(tiny, harmed)[1] > start


@pytest.mark.parametrize("stop", [6, 17])
def test_resume_after_lowered_rates_is_bitwise(
    tiny: Any,
    projected: Any,
    files_in: Callable[..., dict[str, bytes]],
    stop_at: Callable[[int], None],
    stop: int,
) -> None:
    phase = tiny.phase("blockwise", steps=12, probe_tokens=64)
    both = tiny.phase("global", steps=8, kd_weight=1.0, force="true", probe_tokens=64)
    phases = phase[:-1] + ", " + both.removeprefix("phases=[")
    whole, _ = tiny.run("whole", phases, TOO_HIGH, init_from=projected.path)
    stop_at(stop)
    with pytest.raises(Interrupted):
        tiny.run("stopped", phases, TOO_HIGH, init_from=projected.path)
    stop_at(0)
    resumed, _ = tiny.run("stopped", phases, TOO_HIGH, resume="auto")
    mine = files_in(resumed.path)
    assert {name: mine[name] for name in files_in(whole.path)} == files_in(whole.path)


def test_unchanged_rates_leave_state_alone_until_the_end(tiny: Any, projected: Any) -> None:
    """The schedule ``none`` leaves rates alone: the state is judged at the last step only."""
    options = {"steps": 12, "lr_schedule": "none", "probe_tokens": 64}
    run, _ = tiny.run(
        "none", tiny.phase("blockwise", **options), TOO_HIGH, init_from=projected.path
    )
    assert not any("has grown" in note for note in tiny.notes)
    assert all(record["put_back"] for record in records(run))
    assert all(record["last"] == record["first"] for record in records(run))
    assert distances(tiny, run) == distances(tiny, projected)
