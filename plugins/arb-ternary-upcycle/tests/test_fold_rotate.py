"""The phase ``fold_rotate`` keeps the function, which transformers computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary.errors import ConfigError
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_train.seeding import derived_generator
from arb_ternary_upcycle.float_model import FloatModel
from arb_ternary_upcycle.folding import Basis, untied
from arb_ternary_upcycle.rotation import random_rotation
from arb_ternary_upcycle.stage_options import FoldRotateConfig
from arb_ternary_upcycle.teacher import read_teacher

TOKENS = torch.arange(80).view(2, 40) * 37 % 256


@pytest.mark.parametrize("size", [1, 2, 9, 24, 64, 96, 576])
def test_rotations_are_orthogonal(size: int) -> None:
    q = random_rotation(size, derived_generator(0, size))
    assert torch.allclose(q @ q.T, torch.eye(size, dtype=torch.float64), atol=1e-12)
    assert torch.equal(q, random_rotation(size, derived_generator(0, size)))
    assert size < 2 or not torch.equal(q, random_rotation(size, derived_generator(1, size)))
    if size & (size - 1) == 0:  # a Hadamard matrix: all of one magnitude
        assert torch.allclose(q.abs(), torch.full_like(q, size**-0.5))
    if size == 576:  # of 64 x 9 no entry exceeds 1 / 8
        assert float(q.abs().max()) <= 1 / 8 + 1e-12


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Qwen3", {}),
        ("Qwen2", {"tie_word_embeddings": True}),
    ],
)
def test_logits_equal_transformers(
    tmp_path: Path,
    run_config: Callable[..., Any],
    save_model: Callable[..., Path],
    kind: str,
    options: dict[str, Any],
) -> None:
    folder = save_model(tmp_path / "teacher", kind, **options)
    split = {"name": "split", "ternary": "scaled_votes", "float": "adamw"}
    given: dict[str, Any] = {
        "Qwen3": {"architecture": "qwen3"},
        "Qwen2": {"query_key_value_bias": True, "optimizer": split},
    }.get(kind, {})
    config = run_config(
        {"name": "load_teacher", "teacher": str(folder), "probe_tokens": 0}, "fold_rotate", **given
    )
    train(config, RunRequest(directory=tmp_path / "run"))
    import transformers

    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()(TOKENS).logits
        teacher = FloatModel(tmp_path / "run/stages/teacher").decoder()(TOKENS)
        prepared = FloatModel(tmp_path / "run/stages/prepared")
        found = prepared.decoder()(TOKENS)
    scale = float(expected.abs().max())
    assert float((teacher - expected).abs().max()) < 1e-4 * max(1, scale)
    assert float((found - expected).abs().max()) < 1e-4 * max(1, scale)
    assert float((found - expected).abs().max()) < 2e-4
    weights = prepared.weights()
    gains = [
        v
        for name, v in weights.items()
        if name.endswith("norm") and "query" not in name and "key" not in name
    ]
    assert all(bool((gain == 1).all()) for gain in gains)
    assert "head" in weights
    before = FloatModel(tmp_path / "run/stages/teacher").weights()
    assert not torch.allclose(
        before["blocks.0.attention.value"], weights["blocks.0.attention.value"], atol=1e-2
    )


@pytest.mark.parametrize("choice", ["fold", "rotate", "rotate_values"])
def test_each_change_of_basis_keeps_the_function(llama: Path, choice: str) -> None:
    teacher = read_teacher(str(llama), "float32")
    fold = choice != "rotate_values"
    rotate = choice == "rotate"
    q = random_rotation(32, derived_generator(5)) if rotate else None
    basis = Basis(teacher.config, fold, q, 5 if choice == "rotate_values" else None)
    model = teacher.model
    with torch.no_grad():
        expected = model(TOKENS)
    before = {name: value.clone() for name, value in teacher._weights()}
    after = {
        f"blocks.{n}.{key}": v
        for n, block in enumerate(teacher.blocks())
        for key, v in basis.block(n, block).items()
    }
    after |= basis.ends(teacher.ends())
    model.load_state_dict({key: after[key.removesuffix(".weight")] for key in model.state_dict()})
    with torch.no_grad():
        assert torch.allclose(model(TOKENS), expected, atol=1e-4)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    values = {f"blocks.{n}.attention.{name}" for n in range(2) for name in ("value", "output")}
    if choice == "rotate_values":
        assert changed == values
    else:
        assert ("embedding" in changed) == rotate
        assert ("blocks.0.feed_forward.down" in changed) == rotate
        assert {"head", "final_norm", "blocks.0.attention.query"} <= changed


def test_untied_preset_has_the_same_function() -> None:
    from arb_ternary_text.models.config import DecoderConfig

    config = DecoderConfig(architecture="bitnet", width=32, heads=4)
    made = untied(config)
    assert (made.tied, made.has_sub_norms, made.feed_forward_activation) == (False, True, "swiglu")
    assert untied(made) is made


def test_invalid_options_are_refused(run_config: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="does not commute"):
        FoldRotateConfig(fold=False)
    with pytest.raises(ValueError, match="there is nothing to do"):
        FoldRotateConfig(fold=False, rotate=False, rotate_values=False)
    load = {"name": "load_teacher", "teacher": "x"}
    with pytest.raises(ConfigError, match="gives the head weights of its own"):
        run_config(load, "fold_rotate", tie_embeddings=True)
    with pytest.raises(ConfigError, match="nothing is rotated"):
        run_config(
            load, {"name": "fold_rotate", "rotate": False, "rotate_values": False, "seed": 1}
        )
    values = {"name": "fold_rotate", "fold": False, "rotate": False}
    with pytest.raises(ConfigError, match="the gain of a sub-norm"):
        run_config(load, values, architecture="bitnet", tie_embeddings=True)
