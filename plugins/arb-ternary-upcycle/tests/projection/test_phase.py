"""The phase ``projection``: what the student computes, its reports, and kills."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from arb_ternary.errors import ConfigError, DataError
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.checkpoint import CheckpointStore
from arb_ternary_train.restore import load_run
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_upcycle.float_model import FloatModel, float_config
from arb_ternary_upcycle.projection import phase as module
from arb_ternary_upcycle.projection.config import ProjectionConfig
from arb_ternary_upcycle.projection.filling import check_projectable, fill
from arb_ternary_upcycle.projection.sequential import Plan, SequentialProjection
from arb_ternary_upcycle.store import Store

#: A Llama but for its attention.
DECOUPLED: dict[str, Any] = {
    "architecture": None,
    "activation": "swiglu",
    "sub_norms": False,
    "attention": "decoupled",
}
DECOUPLED |= {"sem_dim": 4, "geo_dim": 4, "rotary_dim": 8}
SMALL = {"calibration_tokens": 256, "held_out_tokens": 64, "block_size": 32}


@pytest.fixture
def make_stage(write_stage: Callable[..., FloatModel]) -> Callable[..., FloatModel]:
    """Writes a random float model, its gains 1."""

    def make(path: Path, config: DecoderConfig) -> FloatModel:
        torch.manual_seed(0)
        model = Decoder(config, 256)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("gate", "null_key", "null_value")):
                    parameter.normal_()
        return write_stage(path, model)

    return make


@pytest.fixture
def teacher(
    tmp_path: Path, small: DecoderConfig, make_stage: Callable[..., FloatModel]
) -> FloatModel:
    return make_stage(tmp_path / "teacher", small)


def projection(teacher: FloatModel, **options: Any) -> dict[str, Any]:
    return {
        "name": "projection",
        "source": str(teacher.path),
        "teacher": str(teacher.path),
        **SMALL,
        **options,
    }


def states(run: Path) -> dict[str, torch.Tensor]:
    newest, _ = CheckpointStore(run / "checkpoints").newest_good()
    assert newest is not None
    return dict(newest.model)


@pytest.mark.parametrize("activations", ["int8", "float"])
@pytest.mark.parametrize("decoupled", [False, True])
def test_student_computes_what_was_fitted(
    tmp_path: Path,
    small: DecoderConfig,
    teacher: FloatModel,
    make_stage: Callable[..., FloatModel],
    activations: str,
    decoupled: bool,
) -> None:
    """The projection's stream behind the last block is the student's own."""
    source = teacher
    options: dict[str, Any] = {"float_parts": (), "activations": activations, "group_size": "row"}
    if decoupled:
        attention = {**DECOUPLED, "attention_gate": True, "null_key_value": True}
        source = make_stage(tmp_path / "surgery", evolve(small, **attention))
        options |= attention
    model = Decoder(evolve(small, **options), 256).eval()
    student = check_projectable(model, source.config)
    tokens = torch.randint(256, (6, 32), generator=torch.Generator().manual_seed(3))
    plan = Plan(
        activations=activations,
        calibration=tokens[:4],
        held_out=tokens[4:],
    )
    work = SequentialProjection(source, teacher, plan, Store(tmp_path / "work", {}))
    ends = source.ends()
    embedding = work.embedding(ends["embedding"])
    fill(student, {"embedding": ends["embedding"]}, {"embedding": embedding}, residue=True)
    work.start(embedding.dense())
    names = set()
    for number, block in enumerate(student.blocks):
        rounded, errors = work.block(number)
        fill(block, source.block_weights(number), rounded, residue=True)
        assert [error.name for error in errors] == list(rounded)
        names |= set(rounded)
    assert len(names) == (9 if decoupled else 7)
    (expected,) = work.student_stream.read(2, slice(None))
    (of_teacher,) = work.teacher_stream.read(2, slice(None))
    with torch.no_grad():
        torch.testing.assert_close(
            student.run_blocks(student.embed(tokens)), expected, rtol=1e-3, atol=1e-3
        )
        torch.testing.assert_close(of_teacher, teacher.decoder().run_blocks(teacher.embed(tokens)))
    rounded_head, error = work.head(ends["head"], (ends["final_norm"], ends["final_norm"]))
    fill(student, {"head": ends["head"]}, {"head": rounded_head}, residue=True)
    with torch.no_grad():
        mine = student(tokens[4:])
        theirs = teacher.decoder()(tokens[4:])
    assert error.held_out == pytest.approx(float((mine - theirs).norm() / theirs.norm()), rel=1e-3)


def test_output_errors_equal_those_of_the_linear(tmp_path: Path, teacher: FloatModel) -> None:
    """Measure the error of the first down projection again on a decoder."""
    tokens = torch.randint(256, (6, 32), generator=torch.Generator().manual_seed(3))
    plan = Plan(
        config=ProjectionConfig(policy="ls", correction=False),
        activations="float",
        calibration=tokens[:4],
        held_out=tokens[4:],
    )
    work = SequentialProjection(teacher, teacher, plan, Store(tmp_path / "work", {}))
    work.start(None)
    rounded, errors = work.block(0)
    student = teacher.decoder()
    outputs: list[torch.Tensor] = []
    for decoder in (teacher.decoder(), student):
        if decoder is student:
            for name, each in rounded.items():
                decoder.blocks[0].get_submodule(name).weight.copy_(each.dense())
        down = decoder.blocks[0].feed_forward.down
        down.register_forward_hook(lambda _module, _given, out: outputs.append(out))
        with torch.no_grad():
            decoder(tokens)
    for part, found in ((slice(0, 4), errors[-1].calibration), (slice(4, 6), errors[-1].held_out)):
        theirs, mine = (each[part] for each in outputs)
        assert found == pytest.approx(float((mine - theirs).norm() / theirs.norm()), rel=1e-3)


def test_projection_in_a_run(
    tmp_path: Path,
    run_config: Callable[..., Any],
    teacher: FloatModel,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = train(run_config(projection(teacher)), RunRequest(directory=tmp_path / "run"))
    found = json.loads((tmp_path / "run/stages/projection.json").read_text())
    assert len(found["linears"]) == 2 * 7 + 1
    assert {"calibration", "held_out", "rounding", "zeros", "name"} == set(found["linears"][0])
    (phase,) = report.phases
    assert phase["held_out_error"] == pytest.approx(found["medians"]["held_out_error"])
    assert 0 < phase["calibration_error"] < phase["held_out_error"] < 1
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    recorded = [
        error for line in lines if line["event"] == "projection" for error in line["errors"]
    ]
    assert recorded == found["linears"][:-1]
    assert "left" in capsys.readouterr().err
    assert not (tmp_path / "run/stages/projection").exists()
    model = load_run(tmp_path / "run", accumulators=True).model
    votes = [each.logical_votes() for _, each in ternary_modules(model)]
    assert all(int(each.abs().max()) > 20 for each in votes)


@pytest.mark.parametrize(
    ("options", "model"),
    [
        ({"policy": "ls", "correction": False, "residue": False}, {"group_size": 32}),
        (
            {"policy": "absmean", "correction": False},
            {"group_size": "tensor", "scale_rule": "frozen"},
        ),
        ({"policy": "gptq"}, {"float_parts": ["embedding", "head", "norms"], "vote_bits": 4}),
        ({}, {"group_size": "tensor", "scale_rule": "frozen", "learned_norms": True}),
    ],
)
def test_policies_groups_and_float_parts(
    tmp_path: Path,
    run_config: Callable[..., Any],
    teacher: FloatModel,
    options: dict[str, Any],
    model: dict[str, Any],
) -> None:
    optimizer: Any = "scaled_votes"
    if "float_parts" in model:
        optimizer = {"name": "split", "ternary": "scaled_votes", "float": "adamw"}
    train(
        run_config(projection(teacher, **options), optimizer=optimizer, **model),
        RunRequest(directory=tmp_path / "r"),
    )
    student = load_run(tmp_path / "r", accumulators=True).model
    weights = teacher.weights()
    assert isinstance(student, Decoder)
    for name, each in ternary_modules(student):
        if name.endswith("norm"):
            assert bool((each.dense_weight() == 1).all())
            continue
        error = float((each.dense_weight() - weights[name]).norm() / weights[name].norm())
        assert 0.2 < error < 1, name
        assert bool(each.logical_votes().any()) == options.get("residue", True)
        if model.get("group_size") == "tensor" and name != "embedding":
            assert len(set(each.exponent.flatten().tolist())) == 1
    if "float_parts" in model:
        for name in ("embedding", "head"):
            assert torch.equal(student.get_submodule(name).weight, weights[name])


class Killed(BaseException):
    """An error that nothing catches."""


@pytest.mark.parametrize(
    ("place", "number"), [("block", 0), ("block", 1), ("_block", 0), ("head", 0)]
)
def test_killed_projection_ends_with_the_same_bits(
    tmp_path: Path,
    run_config: Callable[..., Any],
    teacher: FloatModel,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    number: int,
) -> None:
    config = run_config(projection(teacher))
    train(config, RunRequest(directory=tmp_path / "whole"))
    owner: Any = module.ProjectionPhase if place == "_block" else SequentialProjection
    calls = [0]
    original = getattr(owner, place)
    armed = [True]

    def killed(self: Any, *given: Any) -> Any:
        found = original(self, *given)
        if armed[0] and calls[0] == number:
            raise Killed
        calls[0] += 1
        return found

    monkeypatch.setattr(owner, place, killed)
    with pytest.raises(Killed):
        train(config, RunRequest(directory=tmp_path / "cut"))
    armed[0] = False
    calls[0] = 0
    train(config, RunRequest(directory=tmp_path / "cut", resume="auto"))
    if place != "head":
        assert calls[0] == 2 - number - (place == "_block"), "finished blocks are not made again"
    whole = states(tmp_path / "whole")
    cut = states(tmp_path / "cut")
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    for file in ("stages/projection.json", "metrics.jsonl"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "cut" / file).read_bytes()


def test_projection_changes_one_block_at_a_time(
    tmp_path: Path,
    run_config: Callable[..., Any],
    teacher: FloatModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed: list[set[str]] = []
    original = module.fill

    def watched(root: Any, *given: Any, **options: Any) -> None:
        student = students[0]
        before = {name: value.clone() for name, value in student.state_dict().items()}
        original(root, *given, **options)
        after = student.state_dict()
        different = {name for name in before if not torch.equal(before[name], after[name])}
        changed.append(
            {
                ".".join(name.split(".")[: 2 if name.startswith("blocks") else 1])
                for name in different
            }
        )

    students: list[Any] = []
    check = module.check_projectable
    monkeypatch.setattr(
        module, "check_projectable", lambda *given: students.append(check(*given)) or students[0]
    )
    monkeypatch.setattr(module, "fill", watched)
    train(run_config(projection(teacher)), RunRequest(directory=tmp_path / "run"))
    assert changed == [{"embedding"}, {"blocks.0"}, {"blocks.1"}, {"head"}]


def test_impossible_projections_are_refused(
    tmp_path: Path, small: DecoderConfig, teacher: FloatModel
) -> None:
    def student(**options: Any) -> Decoder:
        return Decoder(evolve(small, float_parts=(), **options), 256)

    with pytest.raises(ConfigError, match="linears are float"):
        check_projectable(Decoder(small, 256), teacher.config)
    with pytest.raises(
        ConfigError, match="`attention` of the model is decoupled, that of the stage is standard"
    ):
        check_projectable(student(**DECOUPLED), teacher.config)
    with pytest.raises(ConfigError, match="`residual_scale` is -1"):
        check_projectable(student(residual_scale=-1), teacher.config)
    with pytest.raises(ConfigError, match="Put the phase `fold_rotate` before"):
        fill(student(), {"final_norm": torch.full((32,), 2.0)}, {}, residue=True)
    experts = float_config(DecoderConfig(width=32, layers=1, heads=4, experts=2, max_length=64))
    with pytest.raises(ConfigError, match="has experts"):
        check_projectable(Decoder(evolve(experts, float_parts=(), inner_gains=False), 256), experts)


def test_gains_of_query_and_key_norms_are_not_said_to_fold(small: DecoderConfig) -> None:
    """No linear reads these norms, so that `fold_rotate` leaves their gains where they are."""
    source = evolve(small, architecture="qwen3", inner_gains=True)
    options = {"float_parts": ("norms",), "inner_gains": False}
    block = Decoder(evolve(source, **options), 256).blocks[0]
    gains = {"attention.key_norm": torch.full((8,), 2.0)}
    with pytest.raises(ConfigError, match=r"attention.key_norm has gains other than 1") as caught:
        fill(block, gains, {}, residue=True)
    assert caught.value.hint == (
        "Add `norms` to `model.float_parts` and set `model.inner_gains: true`."
    )
    held = Decoder(evolve(source, float_parts=("norms",)), 256).blocks[0]
    fill(held, gains, {}, residue=True)
    assert torch.equal(held.get_parameter("attention.key_norm.weight"), gains["attention.key_norm"])


def test_unused_options_are_refused(run_config: Callable[..., Any], teacher: FloatModel) -> None:
    for options, match in (
        ({"policy": "ls", "activation_order": "always"}, "'policy' is ls"),
        ({"policy": "gptq", "descent_passes": 3}, "'policy' is gptq"),
        ({"block_size": 65}, "exceeds the context"),
    ):
        with pytest.raises(ConfigError, match=match):
            run_config({**projection(teacher), **options})


def test_missing_stage_names_its_phase(tmp_path: Path, run_config: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match="load_teacher"):
        train(run_config({"name": "projection", **SMALL}), RunRequest(directory=tmp_path / "run"))


def test_projected_llama_is_near_transformers(
    tmp_path: Path, run_config: Callable[..., Any], llama: Path
) -> None:
    """The fitted student predicts more like the teacher than one that is only rounded."""
    tokens = torch.randint(256, (8, 64), generator=torch.Generator().manual_seed(4))
    transformers = pytest.importorskip("transformers")
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(llama)(
            tokens
        ).logits.log_softmax(dim=-1)
    first = [{"name": "load_teacher", "teacher": str(llama), "probe_tokens": 0}, "fold_rotate"]
    sizes = {"calibration_tokens": 4096, "held_out_tokens": 64, "block_size": 64}
    found = {}
    for policy, options in (("ls", {"correction": False}), ("gptq_cd", {})):
        phase = {"name": "projection", "policy": policy, **sizes, **options}
        train(run_config(*first, phase), RunRequest(directory=tmp_path / policy))
        with torch.no_grad():
            mine = load_run(tmp_path / policy).model(tokens).log_softmax(dim=-1)
        found[policy] = float((expected.exp() * (expected - mine)).sum(dim=-1).mean())
    assert found["gptq_cd"] < 0.9 * found["ls"], found
