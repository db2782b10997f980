"""The check ``compare``, against a plain forward pass through both models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from arb_ternary.errors import ConfigError, DataError
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_upcycle.streams import attention_of
from arb_ternary_upcycle.verification import pair as pairs
from arb_ternary_upcycle.verification.compare import CompareCheck, Difference
from arb_ternary_upcycle.verification.config import CompareConfig, Limits

Run = Callable[..., Any]
ANY = Limits(max_max_l1=1e9)


def outputs(model: Decoder, tokens: torch.Tensor) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return logits and outputs of attention layers from a plain forward pass."""
    seen: list[np.ndarray] = []
    hooks = [
        block.attention.register_forward_hook(lambda m, i, o: seen.append(o.double().numpy()))
        for block in model.blocks
    ]
    with torch.no_grad():
        logits = model.eval()(tokens).double().numpy()
    for hook in hooks:
        hook.remove()
    return logits, seen


def held_out(context: Any, batches: int) -> list[torch.Tensor]:
    return [
        batch.data[:, :-1] for batch in context.data.held_out(*context.evaluation_shape, batches)
    ]


def test_compare_equals_a_plain_forward_pass(
    run: Run, report: Any, teacher: Decoder, student: Decoder
) -> None:
    context = run(student)
    result = CompareCheck(CompareConfig(batches=4, attention=ANY, logits=ANY)).check(context)
    both = [
        [outputs(model, tokens) for tokens in held_out(context, 4)] for model in (teacher, student)
    ]
    logits = np.concatenate([abs(a[0] - b[0]).ravel() for a, b in zip(*both, strict=True)])
    layers = [
        np.concatenate([abs(a[1][n] - b[1][n]).ravel() for a, b in zip(*both, strict=True)])
        for n in range(2)
    ]
    attention = np.concatenate(layers)
    wanted = {
        "attention_mean_l1": attention.mean(),
        "attention_max_l1": attention.max(),
        "logits_mean_l1": logits.mean(),
        "logits_max_l1": logits.max(),
    }
    assert result.metrics == pytest.approx(wanted, rel=1e-5)
    assert logits.max() > 3 * logits.mean() > 0  # not one number under two names
    found = report(context, "compare")
    assert found["metrics"] == result.metrics
    assert [each["max_l1"] for each in found["details"]["layers"]] == pytest.approx(
        [a.max() for a in layers], rel=1e-5
    )
    assert found["details"]["batches"] == 4
    assert found["details"]["tokens"] == 4 * 3 * 24


def test_identical_models_have_no_differences(run: Run, teacher: Decoder) -> None:
    teacher.train()
    before = torch.get_rng_state()
    result = CompareCheck(
        CompareConfig(attention=Limits(max_max_l1=0.0), logits=Limits(max_mean_l1=0.0))
    ).check(run(teacher))
    assert result.passed
    assert set(result.metrics.values()) == {0.0}
    assert teacher.training
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(block.attention._forward_hooks for block in teacher.blocks)


@pytest.mark.parametrize("what", ["attention", "logits"])
@pytest.mark.parametrize("limit", ["max_mean_l1", "max_max_l1"])
def test_number_at_the_limit_passes(
    run: Run, student: Decoder, report: Any, what: str, limit: str
) -> None:
    context = run(student)
    measured = (
        CompareCheck(CompareConfig(**{what: ANY})).check(context).metrics[f"{what}_{limit[4:]}"]
    )
    for allowed, passes in ((measured, True), (np.nextafter(measured, 0), False)):
        config = CompareConfig(**{what: Limits(**{limit: float(allowed)})})
        result = CompareCheck(config).check(context)
        assert (result.passed, result.fails_run) == (passes, True)
        assert report(context, "compare")["passed"] is passes
        assert ("fail_fast: false reports it" in result.summary) is not passes
    assert f"{what} {limit[4:]} {measured:.6g}, at most" in result.summary


def test_reported_failure_has_its_report_under_its_label(
    run: Run, student: Decoder, report: Any
) -> None:
    config = CompareConfig(logits=Limits(max_mean_l1=0.0), fail_fast=False, label="early")
    result = CompareCheck(config).check(context := run(student))
    assert (result.passed, result.fails_run) == (False, False)
    assert "fail_fast" not in result.summary
    found = report(context, "early")
    assert (found["passed"], found["fails_run"], found["step"], found["check"]) == (
        False,
        False,
        7,
        "compare",
    )
    assert found["judged"][0]["limit"] == 0.0


def test_nan_does_not_pass(run: Run, student: Decoder, report: Any) -> None:
    with torch.no_grad():
        student.head.weight[7, 3] = float("nan")
    result = CompareCheck(CompareConfig(logits=ANY)).check(context := run(student))
    assert not result.passed
    assert report(context, "compare")["metrics"]["logits_max_l1"] == "nan"


def test_grouping_does_not_change_the_numbers(
    run: Run, student: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CompareConfig(attention=ANY, logits=ANY)
    whole = CompareCheck(config).check(run(student)).metrics
    monkeypatch.setattr(pairs, "_STREAM_BYTES", 1)
    monkeypatch.setattr(pairs, "_LOGITS_AT_ONCE", 256 * 5)
    assert CompareCheck(config).check(run(student)).metrics == pytest.approx(whole, rel=1e-5)


def test_newest_stage_is_the_teacher(
    run: Run, write_stage: Any, student: Decoder, teacher: Decoder, tmp_path: Any
) -> None:
    config = CompareConfig(logits=Limits(max_max_l1=0.0))
    context = run(student)
    assert not CompareCheck(config).check(context).passed
    write_stage(context.directory / "stages" / "prepared", student)
    assert CompareCheck(config).check(context).passed
    named = write_stage(tmp_path / "elsewhere", teacher).path
    assert not CompareCheck(evolve(config, teacher=named)).check(context).passed


def test_other_sizes_are_compared_by_logits_only(run: Run, small: DecoderConfig) -> None:
    shallow = Decoder(evolve(small, layers=1, width=16, head_dim=8), 256)
    assert CompareCheck(CompareConfig(logits=ANY)).check(run(shallow)).passed
    with pytest.raises(ConfigError, match="1 layers of width 16, the teacher 2 of 32"):
        CompareCheck(CompareConfig(attention=ANY)).check(run(shallow))


def test_incomparable_models_are_refused(run: Run, small: DecoderConfig) -> None:
    config = CompareConfig(logits=ANY)
    with pytest.raises(
        ConfigError, match="only a decoder is compared with a teacher, not a Linear"
    ):
        CompareCheck(config).check(run(torch.nn.Linear(2, 2)))
    with pytest.raises(DataError, match="the teacher has 256 ids, the student 300"):
        CompareCheck(config).check(run(Decoder(small, 300)))
    other = Decoder(small, 256)
    other.blocks[1] = torch.nn.Identity()
    with pytest.raises(ConfigError, match="block 1 of the model: it has no attention"):
        attention_of(other, 1)


def test_config_without_a_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="'attention' or 'logits' must be given"):
        CompareConfig()
    with pytest.raises(ValueError, match="'max_mean_l1' or 'max_max_l1' must be given"):
        Limits()


def test_differences_add_up_and_keep_nan() -> None:
    found = Difference()
    found.add(torch.tensor([1.0, -2.0]), torch.tensor([0.0, 1.0]))
    found.add(torch.tensor([5.0]), torch.tensor([5.0]))
    assert found.to_json() == pytest.approx({"mean_l1": 4 / 3, "max_l1": 3.0})
    found.add(torch.tensor([float("nan")]), torch.tensor([0.0]))
    found.add(torch.tensor([9.0]), torch.tensor([0.0]))
    assert np.isnan(found.largest)
