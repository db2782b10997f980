"""A run that cannot fit into memory is refused before anything is allocated."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from torch import nn

from arb_ternary.cli.main import main
from arb_ternary.config.choice import ModelChoice
from arb_ternary.errors import ArbError, ConfigError
from arb_ternary.specs import ModelSpec
from arb_ternary_text.models import decoder
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_train import memory
from arb_ternary_train.memory import estimate_model, free_memory

VOCABULARY = 256


def decoder_of(tiny: Any, **sizes: int) -> ModelChoice:
    """Return a pure decoder of width 256 with a feed-forward layer of 4 times the width."""
    options = DecoderConfig(width=256, heads=4, **sizes)
    return evolve(tiny.config().model, options=options)


@pytest.mark.parametrize("layers", [1, 2, 3, 4096])
def test_parameters_are_counted_without_building_all_layers(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, layers: int
) -> None:
    built = []
    make = decoder.Block
    monkeypatch.setattr(decoder, "Block", lambda config: built.append(1) or make(config))

    estimate = estimate_model(decoder_of(tiny, layers=layers), VOCABULARY)

    # Embedding and head, four matrices of attention, two of 256 x 1024.
    assert estimate is not None
    assert estimate[0] == 2 * 256 * 256 + layers * (4 * 256 * 256 + 2 * 256 * 1024)
    assert len(built) <= 3


def test_bytes_are_those_of_the_tensors_of_a_built_model(tiny: Any) -> None:
    choice = decoder_of(tiny, layers=3)
    model = choice.build(VOCABULARY)
    tensors = [*model.parameters(), *model.buffers()]

    estimate = estimate_model(choice, VOCABULARY)

    assert estimate is not None
    assert estimate[1] == sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def test_a_model_that_does_not_fit_is_refused_before_it_is_built(tiny: Any) -> None:
    with pytest.raises(ArbError) as caught:
        tiny.run("run", "model.width=1048576", "model.layers=4096")

    # 12 layers of width x width each, a packed weight and a vote: more than a byte per weight.
    assert caught.value.what.startswith("model: needs ")
    assert " PiB of memory for 54,0" in caught.value.what
    assert "are free" in caught.value.what
    assert "model.width (1048576), model.layers (4096)" in caught.value.hint
    assert caught.value.exit_code == 1
    assert not (tiny.folder / "run").exists()


def test_a_batch_that_does_not_fit_is_refused(tiny: Any) -> None:
    with pytest.raises(ArbError) as caught:
        tiny.run("run", "phases.0.batch_size=2147483647")

    # 2^31 samples of 8 tokens: ids and targets of 8 bytes, and 16 features of 2 bytes.
    assert caught.value.what.startswith("phases[0]: a micro-batch needs at least 768.0 GiB")
    assert "phases[0].batch_size (2147483647)" in caught.value.hint
    assert not (tiny.folder / "run").exists()


def test_a_model_that_surely_fits_is_not_counted(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(memory, "estimate_model")
    memory.check_model_fits(tiny.config().model, VOCABULARY)


def test_what_counts_is_the_memory_that_is_free(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = decoder_of(tiny, layers=3)
    estimate = estimate_model(choice, VOCABULARY)
    assert estimate is not None
    monkeypatch.setattr(memory, "free_memory", lambda device: estimate[1])
    memory.check_model_fits(choice, VOCABULARY)
    monkeypatch.setattr(memory, "free_memory", lambda device: estimate[1] - 1)
    with pytest.raises(ArbError, match="model: needs "):
        memory.check_model_fits(choice, VOCABULARY)


@frozen
class ReadsItsWeights:
    """Options and factory of a model that looks at a number while it is built."""

    width: int = 2**20

    @staticmethod
    def build(config: ReadsItsWeights, vocabulary_size: int) -> nn.Module:
        assert torch.ones(1).item() == 1
        return nn.Linear(2, 2)


def test_a_model_that_computes_while_it_is_built_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "reads_its_weights", ReadsItsWeights)  # type: ignore[arg-type]
    spec = ModelSpec(name="reads", target="reads_its_weights:build")
    choice = ModelChoice("reads", ReadsItsWeights(), frozenset(), spec)

    assert estimate_model(choice, VOCABULARY) is None
    memory.check_model_fits(choice, VOCABULARY)


def test_free_memory_is_some_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < free_memory(torch.device("cpu")) < 1 << 50


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.layers=9223372036854775807", "model.layers: must be a whole number from 1 to 4096"),
        ("model.width=9223372036854775807", "model.width: must be a whole number from 1 to 10485"),
        ("threads=1000000", "threads: must be from 1 to 1024, or auto, not 1000000"),
        ("phases.0.grad_clip=.inf", "phases[0].grad_clip: must be 0, or of a size from 1.2e-38"),
        ("phases.0.lr=.inf", "phases[0].lr: must be 0, or of a size from 1.2e-38"),
        ("seed=9223372036854775808", "seed: must be at most 9223372036854775807"),
        ("phases.0.steps=2147483648", "phases[0].steps: must be at most 2147483647"),
    ],
)
def test_validation_refuses_a_number_that_training_could_not_use(
    tiny: Any, capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    assert main(["config", "validate", str(tiny.file), "-o", override]) == ConfigError.exit_code
    assert said in capsys.readouterr().err


def test_the_largest_seed_trains(tiny: Any) -> None:
    directory, _ = tiny.run("run", "seed=9223372036854775807", "phases.0.steps=2")
    assert directory.record()["seed"] == 2**63 - 1
