"""Whole training runs under ``exact: true``: the bytes of the torch backend, whatever the processor
and the threads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from attrs import frozen
from safetensors.torch import load

from arb_ternary.backends.select import reset_backends
from arb_ternary_cpu.isa import usable_isas
from arb_ternary_cpu.plugin import ISA
from arb_ternary_train.loading import load_config
from arb_ternary_train.metrics import read_metrics
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train

STEPS = 10
#: Widths that fill no block and no group, a rule that learns exponents, and rates at which a few
#: steps flip many trits.
CONFIG = """
name: exact
exact: true
seed: 5
data: {{name: text, path: {text}, tokenizer: characters}}
model:
  {{name: decoder, width: 40, layers: 2, heads: 2, feed_forward: 72, max_length: 16,
      group_size: 32}}
optimizer: {optimizer}
checkpoint: {{every: 1000, keep: 1}}
phases:
  - {{name: standard, steps: {steps}, batch_size: 4, block_size: 12, eval_every: 5, eval_batches: 2,
     gradient_accumulation_steps: 2}}
"""
OPTIMIZERS = {
    "scaled_votes": "{name: scaled_votes, lr: 0.5, exponent_rate: 0.5}",
    "sign_votes": "{name: sign_votes, accum_threshold: 3, e_accum_threshold: 4}",
    "three_levels": "{name: scaled_votes, lr: 0.5, exponent_rate: 0.5, vote_levels: 3}",
}
RULES = [*list(OPTIMIZERS)[:2], pytest.param("three_levels", marks=pytest.mark.slow)]
#: A norm is a float sum of squares, in an order of each backend's own; nothing but the log reads it
#: here.
NORM_TOLERANCE = 2.0**-18


@frozen
class Trained:
    """What a run left behind: weights, exponents and accumulators; the optimizer's state; what was
    logged.
    """

    model: bytes
    state: bytes
    metrics: tuple[dict[str, Any], ...]

    @property
    def norms(self) -> list[float]:
        return [record["grad_norm"] for record in self.metrics if record["event"] == "train"]

    @property
    def rest(self) -> list[dict[str, Any]]:
        """Everything that was logged but the norms: losses, flips, rates."""
        return [
            {key: value for key, value in record.items() if key != "grad_norm"}
            for record in self.metrics
        ]


Run = Callable[[str, str], Trained]


@pytest.fixture(autouse=True)
def _fresh_backends() -> Iterator[None]:
    reset_backends()
    yield
    reset_backends()
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trains with an optimizer on a backend."""
    folder = tmp_path_factory.mktemp("runs")
    generator = random.Random(0)
    text = folder / "text.txt"
    text.write_text(
        " ".join(generator.choice(["to", "be", "or", "not", "that", "is"]) for _ in range(900))
    )
    made = 0

    def start(optimizer: str, backend: str) -> Trained:
        nonlocal made
        made += 1
        config = folder / f"{optimizer}.yaml"
        config.write_text(CONFIG.format(text=text, optimizer=OPTIMIZERS[optimizer], steps=STEPS))
        directory = folder / f"{optimizer}-{made}"
        train(
            load_config(config, [f"threads={torch.get_num_threads()}"]).config,
            RunRequest(directory=directory, backend=backend, reporter=Silent),
        )
        (last,) = directory.glob("checkpoints/step-*")
        kept = [(last / f"{name}.safetensors").read_bytes() for name in ("model", "state")]
        return Trained(*kept, tuple(read_metrics(directory / "metrics.jsonl")))

    return start


@pytest.fixture(scope="module")
def wanted(run: Run) -> Callable[[str], Trained]:
    """What the torch backend makes of an optimizer, on one thread."""

    @cache
    def trained(optimizer: str) -> Trained:
        torch.set_num_threads(1)
        return run(optimizer, "torch")

    return trained


def cases() -> Iterator[Any]:
    """Every rule with all instructions and numbers of threads: half of them, in which every two
    meet, and slow ones.
    """
    for place in product(enumerate(OPTIMIZERS), enumerate(usable_isas()), enumerate((1, 2))):
        indices, names = zip(*place, strict=True)
        slow = names[0] == "three_levels" or sum(indices) % 2
        yield pytest.param(*names, marks=pytest.mark.slow if slow else ())


@pytest.mark.parametrize(("optimizer", "isa", "threads"), list(cases()))
def test_an_exact_run_has_the_bytes_of_the_torch_backend(
    optimizer: str,
    isa: str,
    threads: int,
    run: Run,
    wanted: Callable[[str], Trained],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = wanted(optimizer)
    monkeypatch.setenv(ISA.name, isa)
    torch.set_num_threads(threads)
    got = run(optimizer, "cpu")
    assert got.rest == expected.rest
    assert got.model == expected.model
    assert got.state == expected.state
    assert got.norms == pytest.approx(expected.norms, rel=NORM_TOLERANCE)


@pytest.mark.parametrize("optimizer", RULES)
def test_such_a_run_moves_trits_exponents_and_accumulators(
    optimizer: str, wanted: Callable[[str], Trained]
) -> None:
    """Otherwise equal bytes would say little."""
    expected = wanted(optimizer)
    model = load(expected.model)
    assert any(bool(model[name].any()) for name in model if name.endswith(".votes"))
    spreads = [
        int(model[name].max()) - int(model[name].min())
        for name in model
        if name.endswith(".exponent")
    ]
    assert max(spreads) > 0
    steps = [record for record in expected.rest if record["event"] == "train"]
    assert len({step["loss"] for step in steps}) == STEPS
