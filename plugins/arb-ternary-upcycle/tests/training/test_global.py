"""The phase ``global``: losses, the comparison at its start, and resumption."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from arb_ternary.errors import ConfigError, Interrupted
from arb_ternary.protocols.data import BatchRequest
from arb_ternary_text.models import transformer
from arb_ternary_train.build import build_parts
from arb_ternary_train.seeding import derive_seed
from arb_ternary_upcycle import global_phase
from arb_ternary_upcycle.distillation import divergence
from arb_ternary_upcycle.float_model import FloatModel
from arb_ternary_upcycle.global_phase import DistillingLoop
from arb_ternary_upcycle.teacher_module import Teacher

MODELS = ("checkpoints/*/model.safetensors",)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_divergence_equals_torch_in_float64(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    student = (torch.randn(3, 7, 11, generator=generator) * 4).requires_grad_()
    teacher = torch.randn(3, 7, 11, generator=generator) * 4
    counts = torch.rand(3, 7, generator=generator) < 0.6
    loss = divergence(student, teacher, counts, temperature)
    (gradient,) = torch.autograd.grad(loss, student)
    wide = student.detach().double().requires_grad_()
    inputs = F.log_softmax(wide[counts] / temperature, dim=-1)
    targets = F.softmax(teacher.double()[counts] / temperature, dim=-1)
    wanted = F.kl_div(inputs, targets, reduction="batchmean") * temperature**2
    (wanted_gradient,) = torch.autograd.grad(wanted, wide)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert torch.allclose(gradient.double(), wanted_gradient, rtol=1e-4, atol=1e-8)


def test_divergence_of_equal_or_no_predictions_is_zero() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    same = divergence(logits, logits.detach(), torch.ones(2, 3, dtype=torch.bool), 2.0)
    assert same.item() == pytest.approx(0, abs=1e-7)
    nothing = divergence(logits, torch.randn(2, 3, 5), torch.zeros(2, 3, dtype=torch.bool), 2.0)
    nothing.backward()  # type: ignore[no-untyped-call]
    assert float(nothing.detach()) == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_loss_is_cross_entropy_plus_weighted_divergence(tiny: Any) -> None:
    phase = tiny.phase(
        "global", steps=1, kd_weight=0.7, kd_temperature=2.0, force="true", probe_tokens=0
    )
    run, _ = tiny.run("run", phase)
    config = tiny.config()
    parts = build_parts(config)
    batch = next(
        parts.data.batches(BatchRequest(2, 16, derive_seed(config.seed, "phase 0", "order")))
    )
    inputs = batch.data[:, :-1]
    targets = batch.data[:, 1:].flatten()
    with torch.no_grad():
        student, teacher = (
            each(inputs).double().flatten(0, 1) for each in (parts.model, tiny.teacher)
        )
    kl = F.kl_div(F.log_softmax(student / 2, -1), F.softmax(teacher / 2, -1), reduction="batchmean")
    wanted = F.cross_entropy(student, targets) + 0.7 * 4.0 * kl
    loss = json.loads(run.metrics_file.read_text().splitlines()[0])["loss"]
    assert loss == pytest.approx(float(wanted), rel=1e-5)


def losses_of(run: Any) -> list[float]:
    lines = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    return [line["loss"] for line in lines if line.get("event", "step") == "step"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loss_in_blocks_equals_the_whole_loss(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    options = {"kd_weight": 0.7, "kd_temperature": 2.0, "force": "true", "teacher_dtype": dtype}
    phase = tiny.phase("global", steps=1, **options)
    whole, _ = tiny.run("whole", phase)
    monkeypatch.setattr(transformer, "MANY_LOGITS", 1)
    monkeypatch.setattr(DistillingLoop, "predict", lambda *_: pytest.fail("all logits were made"))
    blocks, _ = tiny.run("blocks", phase)
    assert losses_of(blocks) == pytest.approx(losses_of(whole), rel=1e-5)


def test_bfloat16_teacher_takes_half_the_memory(tiny: Any) -> None:
    model = FloatModel(tiny.folder / "teacher")
    matrices = sum(
        each.weight.nbytes for each in model.block(0).modules() if isinstance(each, torch.nn.Linear)
    )
    gains = sum(each.nbytes for each in model.block(0).state_dict().values()) - matrices
    tokens = torch.arange(64).view(2, 32)
    teacher = Teacher(model, matrices + 2 * gains, torch.device("cpu"), "bfloat16")
    found = teacher(tokens)
    wanted = tiny.teacher(tokens)
    assert set(teacher._kept) == {0, 1}, "both blocks are held in the memory of one"
    assert teacher.hidden(tokens).dtype == torch.float32
    assert found.dtype == torch.bfloat16
    # Seven matrices of each block and the head, of 8 bits each.
    assert 0 < (found.float() - wanted).norm() < 2**-5 * wanted.norm()


def test_without_distillation_it_is_the_standard_phase(
    tiny: Any, files_in: Callable[..., dict[str, bytes]]
) -> None:
    plain, _ = tiny.run("plain", tiny.phase("standard", steps=4))
    alone, _ = tiny.run("alone", tiny.phase("global", steps=4, force="true", teacher="null"))
    taught, _ = tiny.run("taught", tiny.phase("global", steps=4, force="true", kd_weight=0.1))
    assert (
        files_in(plain.path, MODELS)
        == files_in(alone.path, MODELS)
        != files_in(taught.path, MODELS)
    )


def test_distant_student_is_refused_with_numbers(tiny: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"loss is \d\.\d+, \d+\.\d\d times the teacher's \d"
    ) as caught:
        tiny.run("far", tiny.phase("global", steps=2))
    assert "at most 1.5 times" in caught.value.what
    assert "force: true" in caught.value.hint
    run, _ = tiny.run("forced", tiny.phase("global", steps=2, force="true", teacher="null"))
    assert "comparison" not in run.metrics_file.read_text()


def test_student_loss_of_exactly_one_and_a_half_passes(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Result:
        def __init__(self, loss: float) -> None:
            self.loss = loss

    for mine, allowed in ((3.0, True), (3.0001, False), (float("nan"), False)):
        losses = iter([mine, 2.0])
        monkeypatch.setattr(
            global_phase, "evaluate", lambda *_, losses=losses, **__: Result(next(losses))
        )
        if allowed:
            run, _ = tiny.run("allowed", tiny.phase("global", steps=1, probe_tokens=0))
            first = json.loads(run.metrics_file.read_text().splitlines()[0])
            assert (first["event"], first["student"], first["teacher"]) == ("comparison", 3.0, 2.0)
            assert any("the teacher's 2.0000, in samples of 16 tokens" in n for n in tiny.notes)
        else:
            with pytest.raises(ConfigError, match="student's held-out loss"):
                tiny.run(f"refused {mine}", tiny.phase("global", steps=1))


@pytest.mark.parametrize("stop", [2, 5])
def test_resume_after_stop_is_bitwise(
    tiny: Any,
    files_in: Callable[..., dict[str, bytes]],
    stop_at: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    stop: int,
) -> None:
    monkeypatch.setattr(global_phase, "MOST", 1e9)
    phase = tiny.phase(
        "global",
        steps=6,
        kd_weight=0.5,
        eval_every=2,
        eval_batches=1,
        gradient_accumulation_steps=2,
    )
    whole, _ = tiny.run("whole", phase)
    stop_at(stop)
    with pytest.raises(Interrupted):
        tiny.run("stopped", phase)
    stop_at(0)
    resumed, _ = tiny.run("stopped", phase, resume="auto")
    mine = files_in(resumed.path)
    assert {name: mine[name] for name in files_in(whole.path)} == files_in(whole.path)
    assert mine["metrics.jsonl"].count(b"comparison") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kd_temperature": 2.0}, "'kd_weight' is 0"),
        ({"force": "true"}, "no teacher is needed"),
        ({"kd_weight": 1.0, "preserve_state": "true"}, "keeps nothing of earlier batches"),
    ],
)
def test_unused_options_are_refused(tiny: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny.config(tiny.phase("global", **options))
