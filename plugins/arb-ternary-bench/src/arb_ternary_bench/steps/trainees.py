"""The trainees of the study ``step``: a linear or a decoder block in each way of training it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn

from arb_ternary.backends.select import use_backend
from arb_ternary.errors import ArbError
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.models import seed_votes, ternary_modules
from arb_ternary.ternary.module import GroupSize
from arb_ternary_bench.state import fingerprint, state_bytes
from arb_ternary_text.models.attention import Positions
from arb_ternary_text.models.block import Block
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.parts import FloatLinear
from arb_ternary_text.models.rotary import rotary_angles
from arb_ternary_train.audit import audit
from arb_ternary_votes.scaled_votes import ScaledVotes

#: Ways to train without a ternary backend, each with fused AdamW, and what they are.
FLOAT_TRAINEES: Final = {
    "bfloat16": "bfloat16 weights, gradients and moments",
    "bfloat16 autocast": "float32 weights, gradients and moments, products in bfloat16",
    "BitLinear QAT": "float32 weights made ternary in every pass, products in bfloat16, eager",
    "BitLinear QAT compiled": "the same through torch.compile",
}
#: Ends the name of a backend whose gradients are int8.
INT8_GRADIENTS: Final = " int8 gradients"
#: Sequence length, and features of a head, in a block.
_LENGTH: Final = 128
_HEAD: Final = 128


class BitLinear(nn.Linear):
    """A linear of BitNet b1.58 as published: ``x [..., K]`` to ``[..., N]``, without bias.

    Source: Microsoft, "The Era of 1-bit LLMs: Training Tips, Code and FAQ", 2024. Every pass makes
    the weight ternary by its mean absolute value and each row of the input int8 by its largest; the
    gradients of both roundings are those of the identity. The norm that the published layer starts
    with is left to its surroundings, as in the decoder.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # nn.Linear's own name
        x = input
        w = self.weight
        x_quantised = x + (_int8_rows(x) - x).detach()
        w_quantised = w + (_ternary(w) - w).detach()
        return F.linear(x_quantised, w_quantised)


def _int8_rows(x: Tensor) -> Tensor:
    scale = 127.0 / x.abs().max(dim=-1, keepdim=True).values.clamp_(min=1e-5)
    return (x * scale).round().clamp_(-128, 127) / scale


def _ternary(w: Tensor) -> Tensor:
    scale = 1.0 / w.abs().mean().clamp_(min=1e-5)
    return (w * scale).round().clamp_(-1, 1) / scale


@frozen(kw_only=True)
class StepShape:
    """The sizes of the linear or block.

    Attributes:
        out_features: ``N`` of the linear; hidden features of a block's feed-forward layer.
        in_features: ``K`` of the linear; the width of a block.
        rows: tokens per step.
        group_size: weights that share an exponent.
        block: a decoder block (attention and SwiGLU, seven linears) instead of a linear.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
    """

    out_features: int
    in_features: int
    rows: int
    group_size: GroupSize = 128
    block: bool = False
    device: str = "cpu"

    @property
    def title(self) -> str:
        """Its description in the table."""
        if self.block:
            size = f"block of width {self.in_features}, hidden {self.out_features}"
        else:
            size = f"linear {self.out_features}x{self.in_features}"
        return f"{size}, {self.rows} tokens"

    @property
    def head_features(self) -> int:
        """Features of a head of the block."""
        return _HEAD if self.in_features % _HEAD == 0 else self.in_features

    def decoder(self, **options: Any) -> DecoderConfig:
        """Return the options of a decoder with such a block."""
        return DecoderConfig(
            width=self.in_features,
            layers=1,
            heads=self.in_features // self.head_features,
            feed_forward=self.out_features,
            activation="swiglu",
            max_length=_LENGTH,
            **options,
        )


@frozen
class Trainee:
    """A model with its optimizer, ready to take steps.

    Attributes:
        name: see :func:`trainee_names`.
        model: what is trained.
        optimizer: its optimizer.
        step: forward, backward, update and the clearing of gradients.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], None]

    def weights(self) -> int:
        """Return the number of learnable numbers."""
        return audit(self.model).parameters

    def state_bytes(self) -> int:
        """Return what training keeps."""
        return state_bytes(self.model, self.optimizer)

    def fingerprint(self) -> tuple[float, ...]:
        """Return numbers that change if the weights or their votes do."""
        return fingerprint(self.model)


def trainee_names(backends: Sequence[str], *, compiled: bool) -> list[str]:
    """Return all that takes part: backends with float and int8 gradients, then the float ways."""
    names = [name for backend in backends for name in (backend, f"{backend}{INT8_GRADIENTS}")]
    names += [name for name in FLOAT_TRAINEES if compiled or not name.endswith(" compiled")]
    return names


def build_trainee(name: str, shape: StepShape, seed: int = 0) -> Trainee:
    """Make one of :func:`trainee_names`, with random weights, input and gradient of the output.

    Raises:
        ArbError: a block whose tokens are not whole sequences.
    """
    torch.manual_seed(seed)
    optimizer: torch.optim.Optimizer
    if name in FLOAT_TRAINEES:
        model = _float_model(name, shape).to(shape.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        model = _ternary_model(name, shape).to(shape.device)
        seed_votes(model, seed)
        optimizer = ScaledVotes(dict(ternary_modules(model)))
    run = torch.compile(model) if name.endswith(" compiled") else model

    more: tuple[Any, ...] = ()
    if shape.block:
        length = min(_LENGTH, shape.rows)
        if shape.rows % length:
            raise ArbError(
                f"a block takes whole sequences of {length} tokens; {shape.rows} are none"
            )
        in_size = out_size = (shape.rows // length, length, shape.in_features)
        more = (_positions(length, shape),)
    else:
        in_size = (shape.rows, shape.in_features)  # type: ignore[assignment]
        out_size = (shape.rows, shape.out_features)  # type: ignore[assignment]
    x = torch.randn(in_size).to(shape.device, torch.bfloat16).requires_grad_()
    grad = (torch.randn(out_size) * 1e-3).to(shape.device, torch.bfloat16)

    def step() -> None:
        context: AbstractContextManager[Any] = nullcontext()
        if name != "bfloat16":
            context = torch.autocast(x.device.type, torch.bfloat16)
        with context:
            y: Tensor = run(x, *more)
        y.backward(grad.to(y.dtype))  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        x.grad = None

    return Trainee(name, model, optimizer, step)


def _float_model(name: str, shape: StepShape) -> nn.Module:
    quantised = name.startswith("BitLinear")
    model: nn.Module
    if shape.block:
        model = Block(shape.decoder(float_parts=("linears",), activations="float"))
        if quantised:
            _replace_linears(model)
    elif quantised:
        model = BitLinear(shape.in_features, shape.out_features)
    else:
        model = nn.Linear(shape.in_features, shape.out_features, bias=False)
    return model.to(torch.bfloat16) if name == "bfloat16" else model


def _replace_linears(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, FloatLinear):
                setattr(parent, name, BitLinear(child.in_features, child.out_features))


def _ternary_model(name: str, shape: StepShape) -> nn.Module:
    gradients: Any = "int8" if name.endswith(INT8_GRADIENTS) else "float"
    options: dict[str, Any] = {"group_size": shape.group_size, "gradients": gradients}
    with use_backend(name.removesuffix(INT8_GRADIENTS)):
        if shape.block:
            return Block(shape.decoder(**options))
        return TernaryLinear(shape.in_features, shape.out_features, **options)


def _positions(length: int, shape: StepShape) -> Positions:
    device = torch.device(shape.device)
    cos, sin = rotary_angles(
        0, length, shape.head_features, 10000.0, dtype=torch.float32, device=device
    )
    return Positions(cos, sin, None, True)
