"""What takes part in the step bench: a linear or a decoder block, in each way of training it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor, nn

from arb_ternary.backends.select import use_backend
from arb_ternary.errors import ArbError
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.models import seed_votes, ternary_modules
from arb_ternary.ternary.module import GroupSize
from arb_ternary_bench.steps.bitlinear import BitLinear
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


@frozen(kw_only=True)
class StepShape:
    """What is trained.

    Attributes:
        out_features: ``N`` of the linear; of a block the hidden features of its feed-forward layer.
        in_features: ``K`` of the linear; of a block its width.
        rows: tokens of a step.
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
        what = "block of width" if self.block else "linear"
        size = (
            f"{self.in_features}, hidden {self.out_features}"
            if self.block
            else f"{self.out_features}x{self.in_features}"
        )
        return f"{what} {size}, {self.rows} tokens"


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
        """Learnable numbers."""
        return audit(self.model).parameters

    def state_bytes(self) -> int:
        """What training keeps: weights, votes, exponents, moments; and the gradients that a step
        holds.
        """
        gradients = sum(
            parameter.nbytes for parameter in self.model.parameters() if parameter.requires_grad
        )
        return audit(self.model, self.optimizer).state_bytes + gradients

    def fingerprint(self) -> tuple[float, ...]:
        """Numbers that change when the weights or their votes do."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return tuple(float(tensor.detach().to(torch.float64).abs().sum()) for tensor in tensors)


def trainee_names(backends: Sequence[str], *, compiled: bool) -> list[str]:
    """Everything that takes part: each backend with float and with int8 gradients, then the float
    ways.
    """
    floats = [name for name in FLOAT_TRAINEES if compiled or not name.endswith(" compiled")]
    return [
        name for backend in backends for name in (backend, f"{backend}{INT8_GRADIENTS}")
    ] + floats


def build_trainee(name: str, shape: StepShape, seed: int = 0) -> Trainee:
    """Make one of :func:`trainee_names`, with random weights, input and gradient of the output.

    Raises:
        ArbError: a block whose tokens are not whole sequences.
    """
    torch.manual_seed(seed)
    is_float = name in FLOAT_TRAINEES
    model = (_float_model(name, shape) if is_float else _ternary_model(name, shape)).to(
        shape.device
    )
    optimizer: torch.optim.Optimizer
    if is_float:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    else:
        seed_votes(model, seed)
        optimizer = ScaledVotes(dict(ternary_modules(model)))
    run = torch.compile(model) if name.endswith(" compiled") else model
    sizes: tuple[int, ...] = (shape.rows, shape.in_features)
    more: tuple[Any, ...] = ()
    if shape.block:
        length = min(_LENGTH, shape.rows)
        if shape.rows % length:
            raise ArbError(
                f"a block takes whole sequences of {length} tokens; {shape.rows} are none"
            )
        sizes = (shape.rows // length, length, shape.in_features)
        more = (_positions(length, _head_features(shape), shape.device),)
    out = sizes if shape.block else (shape.rows, shape.out_features)
    x = torch.randn(sizes).to(shape.device, torch.bfloat16).requires_grad_()
    grad = (torch.randn(out) * 1e-3).to(shape.device, torch.bfloat16)
    autocast = name != "bfloat16"

    def step() -> None:
        context: AbstractContextManager[Any] = (
            torch.autocast(x.device.type, torch.bfloat16) if autocast else nullcontext()
        )
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
    if not shape.block:
        kind = BitLinear if quantised else _plain
        model = kind(shape.in_features, shape.out_features)
    else:
        model = Block(_config(shape, float_parts=("linears",), activations="float"))
        if quantised:
            _replace_linears(model)
    return model.to(torch.bfloat16) if name == "bfloat16" else model


def _plain(in_features: int, out_features: int) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=False)


def _replace_linears(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, FloatLinear):
                setattr(parent, name, BitLinear(child.in_features, child.out_features))


def _ternary_model(name: str, shape: StepShape) -> nn.Module:
    backend = name.removesuffix(INT8_GRADIENTS)
    gradients: Any = "int8" if name.endswith(INT8_GRADIENTS) else "float"
    with use_backend(backend):
        if shape.block:
            return Block(_config(shape, group_size=shape.group_size, gradients=gradients))
        return TernaryLinear(
            shape.in_features, shape.out_features, group_size=shape.group_size, gradients=gradients
        )


def _head_features(shape: StepShape) -> int:
    return _HEAD if shape.in_features % _HEAD == 0 else shape.in_features


def _config(shape: StepShape, **options: Any) -> DecoderConfig:
    return DecoderConfig(
        width=shape.in_features,
        layers=1,
        heads=shape.in_features // _head_features(shape),
        feed_forward=shape.out_features,
        activation="swiglu",
        max_length=_LENGTH,
        **options,
    )


def _positions(length: int, features: int, device: str) -> Positions:
    cos, sin = rotary_angles(
        0, length, features, 10000.0, dtype=torch.float32, device=torch.device(device)
    )
    return Positions(cos, sin, None, True)
