"""The phase ``surgery``: exact if all planes are kept, else with the least error.

Expected values come from numpy: sums over pairs, dense matrices, least squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve

from arb_ternary.errors import ConfigError
from arb_ternary_interchange.safetensors.exporter import write_export
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_upcycle.float_model import FloatModel
from arb_ternary_upcycle.surgery.blocks import Split, split_block
from arb_ternary_upcycle.surgery.factors import factorise, second_moment_root
from arb_ternary_upcycle.surgery.pairs import choose_planes, fit_constants, pair_moments
from arb_ternary_upcycle.surgery.phase import decoupled_config

TOKENS = torch.arange(80).view(2, 40) * 37 % 256
#: A llama without its preset, which has standard attention.
PLAIN: dict[str, Any] = {
    "architecture": None,
    "activation": "swiglu",
    "sub_norms": False,
    "query_key_norm": False,
}
SPLIT: dict[str, Any] = {"name": "split", "ternary": "scaled_votes", "float": "adamw"}


def decoupled(sem_dim: int, geo_dim: int, **options: Any) -> dict[str, Any]:
    sizes = {"attention": "decoupled", "sem_dim": sem_dim, "geo_dim": geo_dim, "rotary_dim": 8}
    return {**PLAIN, **sizes, **options}


def surgery(**options: Any) -> dict[str, Any]:
    return {
        "name": "surgery",
        "calibration_tokens": 256,
        "block_size": 64,
        "probe_tokens": 0,
        **options,
    }


def load(folder: Path) -> dict[str, Any]:
    return {"name": "load_teacher", "teacher": str(folder), "probe_tokens": 0}


# --- the whole


@pytest.mark.parametrize(("kind", "rotated", "sem_dim"), [("Llama", True, 3), ("Qwen2", False, 8)])
def test_all_planes_kept_gives_transformers_logits(
    tmp_path: Path,
    run_config: Callable[..., Any],
    save_model: Callable[..., Path],
    kind: str,
    rotated: bool,
    sem_dim: int,
) -> None:
    folder = save_model(tmp_path / "teacher", kind)
    options = decoupled(
        sem_dim, 8, query_key_value_bias=kind == "Qwen2", attention_gate=True, optimizer=SPLIT
    )
    phases = [load(folder), *(["fold_rotate"] if rotated else []), surgery()]
    train(run_config(*phases, **options), RunRequest(directory=tmp_path / "run"))
    import transformers

    model = FloatModel(tmp_path / "run/stages/surgery").decoder()
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()(TOKENS).logits
        assert float((model(TOKENS) - expected).abs().max()) < 1e-4 * float(expected.abs().max())


def test_dropped_planes_score_without_positions(small: DecoderConfig) -> None:
    torch.manual_seed(0)
    teacher = Decoder(small, 256)
    student = decoupled_config(
        small, DecoderConfig(width=32, heads=4, kv_heads=2, **decoupled(6, 2))
    )
    tensors = {
        key.removesuffix(".weight"): value.detach()
        for key, value in teacher.blocks[0].state_dict().items()
    }
    kept = torch.tensor([[1], [3]])
    split = Split(
        kept, torch.ones(4, 4, dtype=torch.complex128), torch.eye(32, dtype=torch.float64)
    )
    made = split_block(tensors, small, student, split, torch.zeros(6, 32))
    model = Decoder(evolve(student, layers=1), 256)
    state = {key: made[key.removesuffix(".weight")] for key in model.blocks[0].state_dict()}
    model.blocks[0].load_state_dict(state)
    x = torch.randn(1, 12, 32)
    with torch.no_grad():
        found = (model.run_blocks(x) - x).numpy()
        # The teacher's own arithmetic in numpy, with planes that are not kept left unturned.
        normed = (
            (x / (x.square().mean(-1, keepdim=True) + small.norm_eps).sqrt())[0].double().numpy()
        )
    weights = {name: value.double().numpy() for name, value in tensors.items()}
    seen = np.zeros((12, 32))
    for head in range(4):
        group = head // 2
        q = normed @ weights["attention.query"][head * 8 : head * 8 + 8].T
        k = normed @ weights["attention.key"][group * 8 : group * 8 + 8].T
        q = q[:, :4] + 1j * q[:, 4:]
        k = k[:, :4] + 1j * k[:, 4:]
        speed = 10000.0 ** (-np.arange(4) / 4) * np.isin(np.arange(4), kept[group].numpy())
        q, k = (each * np.exp(1j * np.arange(12)[:, None] * speed) for each in (q, k))
        scores = np.where(np.tri(12) > 0, (q @ k.conj().T).real / math.sqrt(8), -np.inf)
        share = np.exp(scores - scores.max(1, keepdims=True))
        share /= share.sum(1, keepdims=True)
        seen[:, head * 8 : head * 8 + 8] = share @ (
            normed @ weights["attention.value"][group * 8 : group * 8 + 8].T
        )
    with torch.no_grad():
        y = x + torch.from_numpy(seen @ weights["attention.output"].T).float()
        expected = (y + teacher.blocks[0].feed_forward(y) - x).numpy()
    assert np.allclose(found, expected, atol=2e-5)


def test_fewer_features_give_larger_errors(
    tmp_path: Path, run_config: Callable[..., Any], save_model: Callable[..., Path]
) -> None:
    folder = save_model(tmp_path / "teacher")
    with torch.no_grad():
        errors = {}
        for name, sizes, options in (
            ("wide", (4, 4), {}),
            ("narrow", (2, 2), {}),
            ("random", (4, 4), {"policy": "random"}),
        ):
            phase = {
                "name": "surgery",
                "probe_tokens": 0,
                **({} if options else surgery()),
                **options,
            }
            train(
                run_config(load(folder), phase, **decoupled(*sizes)),
                RunRequest(directory=tmp_path / name),
            )
            stages = tmp_path / name / "stages"
            teacher, student = (
                FloatModel(stages / stage).decoder() for stage in ("teacher", "surgery")
            )
            errors[name] = float((teacher(TOKENS) - student(TOKENS)).square().mean())
    assert errors["wide"] < errors["narrow"] < errors["random"]


# --- factors


def test_truncation_meets_the_whitened_eckart_young_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, 24, generator=generator) @ torch.randn(24, 24, generator=generator)
    query = torch.randn(3, 8, 24, generator=generator, dtype=torch.float64)
    key = torch.randn(8, 24, generator=generator, dtype=torch.float64)
    root = second_moment_root(inputs)
    moment = (inputs.double().T @ inputs.double() / len(inputs)).numpy()
    assert np.allclose((root @ root).numpy(), moment)
    half = root.numpy()
    dense = np.concatenate([half @ (a.T @ key).numpy() @ half for a in query])
    values = np.linalg.svd(dense, compute_uv=False)
    for rank in range(9):
        few, keys = factorise(query, key, root, rank)
        made = np.concatenate([half @ (a.T @ keys).numpy() @ half for a in few])
        bound = math.sqrt(float((values[rank:8] ** 2).sum()))
        assert np.linalg.norm(dense - made) == pytest.approx(bound, abs=1e-9 * values[0])
        # Balanced: each row carries the root of its singular value on both sides.
        if rank < 8:
            assert np.allclose(
                np.linalg.norm(keys.numpy() @ half, axis=1), np.sqrt(values[:rank]), rtol=1e-6
            )
        else:
            assert torch.equal(few, query)  # nothing is given up


def test_low_rank_inputs_lose_nothing() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(50, 3, generator=generator) @ torch.randn(3, 16, generator=generator)
    query = torch.randn(2, 8, 16, generator=generator)
    key = torch.randn(8, 16, generator=generator)
    few, keys = factorise(query, key, second_moment_root(inputs), 5)
    assert bool(torch.isfinite(few).all() and torch.isfinite(keys).all())
    wanted = inputs.double() @ (query[1].T @ key).double() @ inputs.T.double()
    found = inputs.double() @ (few[1].T @ keys) @ inputs.T.double()
    assert torch.allclose(found, wanted, atol=1e-6 * float(wanted.abs().max()))


# --- planes


@pytest.fixture
def pairs() -> Any:
    """Random queries and keys of one sample, and features of all pairs, by numpy."""
    config = DecoderConfig(
        width=16,
        heads=4,
        kv_heads=2,
        head_dim=8,
        rotary_base=50.0,
        sliding_window=10,
        max_length=64,
    )
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(1, 14, 32, generator=generator)
    key = torch.randn(1, 14, 16, generator=generator)
    rows = []  # (head, weight, features) of every row's pairs
    for head in range(4):
        q = query[0, :, head * 8 : head * 8 + 8].double().numpy()
        k = key[0, :, head // 2 * 8 : head // 2 * 8 + 8].double().numpy()
        q = q[:, :4] + 1j * q[:, 4:]
        k = k[:, :4] + 1j * k[:, 4:]
        theta = 50.0 ** (-np.arange(4) / 4)
        for t in range(14):
            seen = [s for s in range(t + 1) if t - s < 10]
            z = np.array([q[t] * k[s].conj() for s in seen])
            turned = np.array(
                [(q[t] * k[s].conj() * np.exp(1j * theta * (t - s))).real for s in seen]
            )
            scores = turned.sum(1) / math.sqrt(8)
            weight = np.exp(scores) / np.exp(scores).sum()
            features = np.concatenate([z.real, -z.imag, turned], axis=1)
            rows.append((head, weight, features - weight @ features))
    return config, query, key, rows


def test_moments_equal_sums_over_pairs(pairs: Any) -> None:
    config, query, key, rows = pairs
    expected = np.zeros((4, 12, 12))
    for head, weight, features in rows:
        expected[head] += (features * weight[:, None]).T @ features
    found = pair_moments(query, key, config)
    assert np.allclose(found.numpy(), expected, rtol=1e-4, atol=1e-4)


def best_constants(rows: Any, head: int, dropped: Any) -> tuple[Any, float]:
    """Fit the constants of dropped planes by least squares; return them and the error."""
    features = np.concatenate(
        [np.sqrt(weight)[:, None] * f for each, weight, f in rows if each == head]
    )
    system = features[:, [*dropped, *(p + 4 for p in dropped)]]
    count = len(dropped)
    strength = math.sqrt(1e-3 * np.mean((system**2).sum(0)))
    towards = strength * np.array([1.0] * count + [0.0] * count)
    goal = np.concatenate([features[:, [8 + p for p in dropped]].sum(1), towards])
    whole = np.concatenate([system, strength * np.eye(2 * count)])
    solved, *_ = np.linalg.lstsq(whole, goal, rcond=None)
    return solved[:count] + 1j * solved[count:], float(((whole @ solved - goal) ** 2).sum())


def test_dropped_planes_and_constants_are_least_squares(pairs: Any) -> None:
    config, query, key, rows = pairs
    moments = pair_moments(query, key, config)
    kept_GK = choose_planes(moments, 2, 2, 1e-3)
    for group in range(2):
        dropped: list[int] = []
        for _ in range(2):
            left = [p for p in range(4) if p not in dropped]
            costs = [
                sum(best_constants(rows, 2 * group + m, [*dropped, p])[1] for m in range(2))
                for p in left
            ]
            dropped.append(left[int(np.argmin(costs))])
        assert kept_GK[group].tolist() == [p for p in range(4) if p not in dropped]
        for head in (2 * group, 2 * group + 1):
            found = fit_constants(moments, kept_GK, 1e-3)[head]
            expected, _ = best_constants(rows, head, sorted(dropped))
            assert np.allclose(found[sorted(dropped)].numpy(), expected, rtol=1e-3, atol=1e-4)
            assert found[kept_GK[group]].tolist() == [1, 1]


def test_strong_ridge_gives_constants_of_one(pairs: Any) -> None:
    config, query, key, _ = pairs
    moments = pair_moments(query, key, config)
    found = fit_constants(moments, choose_planes(moments, 2, 1, 1e9), 1e9)
    assert torch.allclose(found, torch.ones_like(found), atol=1e-6)


# --- the phase


@pytest.mark.parametrize("policy", ["random", "fresh"])
def test_random_policies_copy_the_rest(
    tmp_path: Path, run_config: Callable[..., Any], llama: Path, policy: str
) -> None:
    phase = {"name": "surgery", "policy": policy}
    options = decoupled(4, 4, kv_heads=2, null_key_value=True, optimizer=SPLIT)
    report = train(
        run_config(load(llama), phase, **options), RunRequest(directory=tmp_path / "run")
    )
    teacher, made = (FloatModel(tmp_path / "run/stages" / name) for name in ("teacher", "surgery"))
    before = teacher.block_weights(1)
    after = made.block_weights(1)
    same = {name for name in before if name in after and torch.equal(before[name], after[name])}
    feed_forward = {f"feed_forward.{name}" for name in ("norm", "gate", "up", "down")}
    kept = {
        "attention.norm",
        *feed_forward,
        *(() if policy == "fresh" else ("attention.value", "attention.output")),
    }
    assert same == kept
    drawn = after["attention.query_semantic"]
    assert float(drawn.std()) == pytest.approx(32**-0.5, rel=0.1)
    assert not torch.equal(drawn, made.block_weights(0)["attention.query_semantic"])
    assert after["attention.planes"].tolist() == [[0, 2], [0, 2]], (
        "evenly among the 4 of a head of 8 features"
    )
    assert float(after["attention.null_key"].abs().sum()) == 0
    assert report.phases[1]["perplexity_ratio"] == pytest.approx(
        math.exp(report.phases[1]["nll"] - report.phases[1]["teacher_nll"])
    )


def test_impossible_splits_are_refused(run_config: Callable[..., Any], llama: Path) -> None:
    for options, message in (
        ({}, "set 'attention': decoupled"),
        (decoupled(4, 10, rotary_dim=12), "'geo_dim' is 10, but a head has 8 features"),
        (decoupled(4, 4, rotary_dim=4), "'rotary_dim' must be that of the teacher's heads, 8"),
        (decoupled(4, 4, kv_heads=4, tie_query_key=True), "svd finds keys that differ"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_config(load(llama), surgery(), **options)
    with pytest.raises(ConfigError, match="exceeds the context"):
        run_config(load(llama), surgery(block_size=65), **decoupled(4, 4))
    with pytest.raises(ConfigError, match="'policy' is fresh"):
        run_config(load(llama), surgery(policy="fresh"), **decoupled(4, 4))


def test_surgery_refuses_query_key_norms(
    tmp_path: Path, run_config: Callable[..., Any], save_model: Callable[..., Path]
) -> None:
    teacher = save_model(tmp_path / "teacher", "Qwen3")
    with pytest.raises(ConfigError, match="query_key_norm: false, the teacher's is true"):
        train(
            run_config(load(teacher), surgery(), **decoupled(4, 4)),
            RunRequest(directory=tmp_path / "run"),
        )


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("policy", ["svd", "random"])
def test_killed_surgery_ends_with_the_same_bytes(
    tmp_path: Path,
    run_config: Callable[..., Any],
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
) -> None:
    phase = (
        surgery() if policy == "svd" else {"name": "surgery", "policy": policy, "probe_tokens": 0}
    )
    config = run_config(load(llama), phase, **decoupled(2, 4))
    train(config, RunRequest(directory=tmp_path / "whole"))

    def kill(file: Path, tensors: Any, metadata: Any) -> Any:
        if file.parent.name != "surgery":
            return write_export(file, tensors, metadata)
        next(iter(tensors.parts()))
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("arb_ternary_upcycle.float_model.write_export", kill)
        with pytest.raises(Killed):
            train(config, RunRequest(directory=tmp_path / "cut"))
    train(config, RunRequest(directory=tmp_path / "cut", resume="auto"))
    cut, whole = (tmp_path / name / "stages/surgery" for name in ("cut", "whole"))
    assert {file.name for file in cut.iterdir()} == {file.name for file in whole.iterdir()}
    assert all((cut / file.name).read_bytes() == file.read_bytes() for file in whole.iterdir())
