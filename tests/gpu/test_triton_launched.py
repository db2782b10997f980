"""Calls for a GPU that is not there: on tensors that have sizes and no values, or recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton_code import every_option
from triton_launches import Launch, launches_of, recording

from arb_ternary.backends import ops, select
from arb_ternary.backends.protocol import ProbeResult, WeightShape
from arb_ternary.backends.select import use_backend
from arb_ternary.backends.vote_state import new_state
from arb_ternary.optim.ternary import TernaryOptimizer
from arb_ternary.ternary.models import seed_votes, ternary_modules
from arb_ternary_text.models.decoder import Decoder, DecoderConfig
from arb_ternary_train.update import ternary_update
from arb_ternary_triton import arguments, products
from arb_ternary_triton.arguments import packed_columns
from arb_ternary_triton.launch import INTERPRETED
from arb_ternary_votes.scaled_votes import ScaledVotes
from arb_ternary_votes.sign_votes import SignVotes


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that would have run."""
    found: list[str] = []

    def launch(kernel: Any, *_: object, **__: object) -> None:
        found.append(kernel.__name__)

    monkeypatch.setattr(products, "launch", launch)
    monkeypatch.setattr(arguments, "serves", lambda tensor: tensor.is_cuda)
    monkeypatch.setattr(ops, "kernel", lambda _backend, op: getattr(products, op))
    return found


def test_lookup_makes_the_host_wait_for_nothing(launched: list[str]) -> None:
    shape = WeightShape(40, 64, 32)
    # Reading a value, for which a host would wait, raises in this mode.
    with FakeTensorMode():
        size = (40, packed_columns(64))
        packed = torch.empty(size, dtype=torch.uint8, device="cuda")
        exponent = torch.empty((40, 2), dtype=torch.int8, device="cuda")
        votes = torch.empty((40, 64), dtype=torch.int8, device="cuda")
        state = new_state(shape, packed, exponent, votes, "triton")
        ids = torch.empty(3, dtype=torch.int64, device="cuda")
        rows = ops.embedding.function(ids, None, state, torch.bfloat16, "float")
    assert rows.shape == (3, 64)
    assert launched == ["lookup_kernel"]


#: Constants of kernels that are sizes of tiles, and follow the sizes of operands.
_TILES = {"ROWS", "OUTPUTS", "BLOCKS", "COLUMNS", "TERMS", "CHUNK"}
#: Constants that are sizes of groups or numbers of parts.
_SIZES = {"GROUP", "UNIT", "UNITS_PER_GROUP", "SPLIT"}


def _options(launch: Launch) -> tuple[str, tuple[tuple[str, Any], ...]]:
    """A kernel and what a call asks of it, whatever the sizes of its operands are."""
    asked = [
        (name, min(value, 2) if name in _SIZES else value)
        for name, value in launch.constants.items()
        if name not in _TILES
    ]
    return launch.kernel.__name__, tuple(sorted(asked))


def _model(gradients: str, scale_rule: str, layers: int = 1) -> torch.nn.Module:
    config = DecoderConfig(
        width=128,
        layers=layers,
        heads=4,
        feed_forward=256,
        architecture="qwen3",
        max_length=128,
        group_size=32,
        scale_rule=scale_rule,
        embedding_scale_rule=scale_rule,
        gradients=gradients,
    )
    return Decoder(config, 256)


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The backend serves the CPU; memory that a recorded kernel does not fill holds zeros."""
    probe = select._probe_named
    monkeypatch.setattr(
        select,
        "_probe_named",
        lambda name, device: ProbeResult(True, "") if name == "triton" else probe(name, device),
    )
    select._serves.cache_clear()
    monkeypatch.setattr(torch, "empty", torch.zeros)
    yield
    select._serves.cache_clear()


@pytest.mark.usefixtures("faked")
@pytest.mark.skipif(INTERPRETED, reason="kernels were made for the interpreter")
def test_a_step_launches_only_what_is_compiled() -> None:
    compiled = {
        _options(launch)
        for call in every_option().values()
        for launch in launches_of(call, "sm_90a")
    }
    launched = {}
    for gradients in ("int8", "float"):
        for rule in ("frozen", "residual"):
            with use_backend("triton"), recording("sm_90a") as launches:
                model = _model(gradients, rule)
                seed_votes(model, 7)
                modules = dict(ternary_modules(model))
                optimizer: TernaryOptimizer = SignVotes(modules)
                if rule == "frozen":
                    optimizer = ScaledVotes(modules, lr=0.1)
                ids = torch.randint(0, 256, (2, 64))
                logits = model(ids)
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.view(-1))
                assert ternary_update(model, optimizer, loss).stepped
                with torch.no_grad():
                    model(ids[:1, :1])  # a token of generation
            launched |= {_options(launch): launch for launch in launches}
    assert {kernel for kernel, _ in launched} >= {
        "row_kernel",
        "linear_kernel",
        "grad_input_kernel",
        "product_votes_kernel",
        "lookup_votes_kernel",
        "quantize_both_kernel",
        "settle_kernel",
        "flip_together_kernel",
        "move_together_kernel",
    }
    assert launched.keys() - compiled == set()


@pytest.mark.usefixtures("faked")
@pytest.mark.skipif(INTERPRETED, reason="kernels were made for the interpreter")
@pytest.mark.parametrize(
    ("gradients", "rule", "most"),
    [
        ("float", "frozen", 73),
        # A gradient is read twice before it is rounded: for its largest element, and to round it.
        ("int8", "frozen", 93),
        ("int8", "residual", 94),
    ],
)
def test_a_step_of_sixteen_matrices_takes_few_launches(
    gradients: str, rule: str, most: int
) -> None:
    with use_backend("triton"), recording("sm_90a") as launches:
        model = _model(gradients, rule, layers=2)
        seed_votes(model, 7)
        modules = dict(ternary_modules(model))
        assert len(modules) == 16
        optimizer: TernaryOptimizer = SignVotes(modules)
        if rule == "frozen":
            optimizer = ScaledVotes(modules, lr=0.1)
        launches.clear()
        ids = torch.randint(0, 256, (8, 128))  # so many rows that no sum is split
        logits = model(ids)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.view(-1))
        assert ternary_update(model, optimizer, loss).stepped
    assert len(launches) <= most


@pytest.mark.skipif(INTERPRETED, reason="kernels were made for the interpreter")
def test_one_row_of_whole_blocks_is_not_copied() -> None:
    shape = WeightShape(64, 256, 128)
    packed = torch.zeros((64, 64), dtype=torch.uint8)
    exponent = torch.zeros((64, 2), dtype=torch.int8)
    x = torch.zeros((1, 256), dtype=torch.int8)
    with recording("sm_90a") as launches:
        products.linear(x, torch.ones(1), packed, exponent, None, shape, torch.float32)
    assert launches[0].arguments[0].data_ptr() == x.data_ptr()
    short = WeightShape(64, 200, 128)
    x = torch.zeros((1, 200), dtype=torch.int8)
    with recording("sm_90a") as launches:
        products.linear(x, torch.ones(1), packed, exponent, None, short, torch.float32)
    assert launches[0].arguments[0].numel() == 64  # words of four
