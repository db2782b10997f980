"""Comparisons and rollbacks in every phase with a loop, with every kind of part and optimizer."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from torch import Tensor

from arb_ternary_orchestrator import branches
from arb_ternary_train.loop import TrainingLoop

#: Compares after steps 8 and 20 (12 + 8).
COMPARING = {
    "name": "orchestrator",
    "decision_interval": 8,
    "hysteresis": 8,
    "eval_horizon": 4,
    "strategies": ["configured", "wild", "wilder"],
    "safety_strategy": "wild",
    "max_overhead": 0.9,
    "snapshot_every": 5,
    "telemetry_every": 2,
}

MODEL = (
    "model={name: decoder, width: 16, layers: 1, heads: 2, max_length: 16, group_size: 32, "
    "float_parts: [%s]%s}"
)
FLOAT = (MODEL % ("embedding, head, norms, linears", "")).replace(" group_size: 32,", "")
PHASE = (
    "phases=[{name: standard, steps: 24, batch_size: 2, block_size: 8, eval_every: 0, "
    "lr_schedule: constant%s}]"
)
MIXED = "{name: split, ternary: {name: %s}, float: adamw}"

CASES = {
    "pure": [MODEL % ("", ""), "optimizer=scaled_votes", PHASE % ""],
    "narrow": [MODEL % ("norms", ", vote_bits: 4"), PHASE % ""],
    "two bits": [MODEL % ("norms", ", vote_bits: 2"), PHASE % ""],
    "float": [FLOAT, "optimizer=adamw", PHASE % ", grad_clip: 0.5"],
    "sign votes": [f"optimizer={MIXED % 'sign_votes, accum_threshold: 2'}", PHASE % ""],
    "momentum votes": [f"optimizer={MIXED % 'momentum_votes'}", PHASE % ""],
    "accumulation": [PHASE % ", gradient_accumulation_steps: 3"],
    "workers": [PHASE % ", num_workers: 2"],
    "memory": [PHASE % ", preserve_state: true"],
    "autocast": [PHASE % ", use_amp: true"],
    "clipping": [PHASE % ", grad_clip: 0.5"],
    "schedule": [PHASE.replace("constant", "linear, min_rate: 0.5, warmup_steps: 4") % ""],
    "gnts of floats": [
        FLOAT,
        "optimizer={name: gqc.gnts, threshold: 0.3, max_batch_draws: 2, inner: adamw}",
        PHASE.replace("24", "16") % "",
    ],
    "gnts": [
        f"optimizer={{name: gqc.gnts, threshold: 0.6, max_batch_draws: 3, inner: "
        f"{MIXED % 'scaled_votes'}}}",
        PHASE % "",
    ],
    "gnts inside": [
        "optimizer={name: split, ternary: scaled_votes, float: {name: gqc.gnts, threshold: 0.3, "
        "max_batch_draws: 3,"
        " inner: adamw}}",
        PHASE % "",
    ],
    "sbc": [
        f"optimizer={{name: gqc.sbc, initial_logical_batch_size: 2.0, inner: "
        f"{MIXED % 'sign_votes'}}}",
        PHASE % "",
    ],
    "progressive": [
        "phases=[{name: progressive, steps_per_stack: 24, target_stacks: 2, batch_size: 2,"
        " block_size: 8, eval_every: 0, lr_schedule: constant}]"
    ],
    "global": [
        "phases=[{name: global, force: true, kd_weight: 0.0, steps: 24, batch_size: 2, block_size: "
        "8, eval_every: 0,"
        " lr_schedule: constant}]"
    ],
}

pytestmark = pytest.mark.usefixtures("harmful")


@pytest.mark.parametrize(
    "case",
    [
        name if name == "gnts of floats" else pytest.param(name, marks=pytest.mark.slow)
        for name in CASES
    ],
)
def test_losing_candidates_leave_no_trace_everywhere(
    case: str, tiny: Any, equal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _skip_without(case)
    # The configured strategy always wins.
    monkeypatch.setattr(
        branches, "_is_better", lambda branch, *_: branch.trial.name == "configured"
    )
    overrides = CASES[case]
    plain = tiny.run("plain", *overrides)
    compared = tiny.run("compared", *overrides, f"phases.0.policy={json.dumps(COMPARING)}")
    begun = [each for each in compared.decisions if each["candidates"]]
    assert begun
    assert {each["to"] for each in begun} == {"configured"}
    assert all(len(each["candidates"]) == 3 for each in begun)
    equal(compared.trained, plain.trained)
    assert compared.steps == plain.steps
    result = json.loads(compared.directory.result_file.read_text())
    assert result["phases"][0]["lost_steps"] == sum(each["steps_spent"] for each in begun) > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_nonfinite_loss_is_survived_and_resume_is_exact(
    case: str, tiny: Any, equal: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _skip_without(case)
    loss = TrainingLoop.loss

    def poisoned(self: Any, batch: Any, masked: Any, output: Tensor) -> Tensor:
        value = loss(self, batch, masked, output)
        # At 17 the probe fails as well, as with broken weights; at 31 only the batch is bad.
        bad = self.microbatches == 17 or (self.microbatches == 31 and self.model.training)
        return value * math.nan if bad else value

    monkeypatch.setattr(TrainingLoop, "loss", poisoned)
    changed = {"safety_strategy": "conservative_adamw", "strategies": None}
    override = f"phases.0.policy={json.dumps({**COMPARING, **changed})}"
    if case in ("pure",):
        override = override.replace("conservative_adamw", "conservative_votes")
    whole = tiny.run("whole", *CASES[case], override)
    assert "safety" in {each["reason"] for each in whole.decisions}
    train = TrainingLoop.train_microbatch
    calls = []

    def stopping(self: Any) -> Any:
        calls.append(None)
        if len(calls) % 9 == 0:
            self.context.request_stop("a test")
        return train(self)

    from arb_ternary.errors import Interrupted

    monkeypatch.setattr(TrainingLoop, "train_microbatch", stopping)
    for _ in range(30):
        try:
            resumed = tiny.run("stopped", *CASES[case], override, resume="auto")
        except Interrupted:
            continue
        break
    assert len(calls) > 18
    equal(resumed.trained, whole.trained)
    equal(resumed.policy, whole.policy)
    assert resumed.metrics == whole.metrics
    assert resumed.decisions == whole.decisions


def _skip_without(case: str) -> None:
    package = {"progressive": "arb_ternary_progressive", "global": "arb_ternary_upcycle"}
    if case.startswith(("gnts", "sbc")):
        pytest.importorskip("arb_ternary_gqc")
    if case in package:
        pytest.importorskip(package[case])
