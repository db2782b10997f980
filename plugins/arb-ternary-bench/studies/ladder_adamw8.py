"""AdamW whose two moments are kept in 8 bits: a plugin file for ``ladder.py`` alone.

After Dettmers and others, "8-bit Optimizers via Block-wise Quantization" (2022): a moment is
divided into blocks of 256 numbers, each block is divided by its largest magnitude, and each number
becomes the nearest of 256 values of a dynamic code, which are close to each other near zero. The
first moment has a code with signs, the second one without. A step decodes both, takes AdamW's step
in float32 and encodes them again. As in the authors' library, tensors of fewer than 4,096 numbers
keep their moments in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from arb_ternary import hookimpl
from arb_ternary.optim.protocol import Trainable
from arb_ternary.specs import OptimizerSpec
from arb_ternary_train.optim.adamw import float_groups
from arb_ternary_train.optim.config import AdamWConfig

ARB_API_VERSION = (1, 0)

#: Numbers that share a scale, and the least of a tensor whose moments are coded.
BLOCK: Final = 256
LEAST: Final = 4096
#: Powers of ten that a dynamic code spans.
_DECADES: Final = 7
# : Low bits of a float32 that the table of codes does without: sign, exponent and 12 bits of the
# mantissa are left.
_DROPPED: Final = 11


def dynamic_code(*, signed: bool) -> Tensor:
    """The 256 values of a dynamic code, ascending, at most 1: float32, ``[256]``.

    The decade below ``10 ** -i`` has half as many values as the one above it; with signs, both
    signs share them. Zero and one are values too.
    """
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        ends = torch.linspace(
            0.1, 1.0, 2 ** (decade if signed else decade + 1) + 1, dtype=torch.float64
        )
        means = 10.0 ** (decade + 1 - _DECADES) * (ends[:-1] + ends[1:]) / 2
        values += means.tolist() + ((-means).tolist() if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32)


class CodedMoment:
    """What a running moment is between steps: a byte a number, and a float32 scale a block of
    :data:`BLOCK`.
    """

    def __init__(self, *, signed: bool) -> None:
        self.values = dynamic_code(signed=signed)
        middles = (self.values[1:] + self.values[:-1]) / 2
        # Of all floats that differ in dropped bits alone, the least one; no two middles lie between
        # such floats.
        keys = torch.arange(1 << (32 - _DROPPED), dtype=torch.int64)
        low = torch.where(
            keys < len(keys) // 2, keys << _DROPPED, ((keys + 1) << _DROPPED) - 1 - (1 << 32)
        )
        self._table = torch.bucketize(low.to(torch.int32).view(torch.float32), middles).to(
            torch.uint8
        )
        self._middles = torch.cat((middles, middles.new_tensor([torch.inf])))

    def encode(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Codes ``uint8 [n]`` and scales ``float32 [ceil(n / 256)]`` of ``numbers``, float32
        ``[n]``.
        """
        count = numbers.numel()
        rows = torch.nn.functional.pad(numbers, (0, -count % BLOCK)).view(-1, BLOCK)
        scales = rows.abs().amax(dim=1)
        shares = (rows / scales.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).view(-1)[
            :count
        ]
        keys = (shares.view(torch.int32) >> _DROPPED).bitwise_and_(len(self._table) - 1)
        codes = self._table.index_select(0, keys)
        codes += shares > self._middles.index_select(0, codes.int())
        return codes, scales

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The numbers that codes and scales stand for, float32 ``[n]``."""
        count = codes.numel()
        rows = torch.nn.functional.pad(
            self.values.index_select(0, codes.int()), (0, -count % BLOCK)
        ).view(-1, BLOCK)
        return (rows * scales[:, None]).view(-1)[:count]


class AdamW8(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) with moments in 8 bits; weights and gradients stay
    float32.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self._moments = {"first": CodedMoment(signed=True), "second": CodedMoment(signed=False)}
        # torch loads state in the number format of its parameter; a code is a byte.
        self.register_load_state_dict_post_hook(_bytes_again)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step for all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        state["step"] = state.get("step", 0) + 1
        gradient = parameter.grad
        assert gradient is not None
        first = self._read(state, "first", parameter).lerp_(gradient, 1 - group["betas"][0])
        second = self._read(state, "second", parameter).mul_(group["betas"][1])
        second.addcmul_(gradient, gradient, value=1 - group["betas"][1])
        self._write(state, "first", first)
        self._write(state, "second", second)
        first_bias, second_bias = (1 - beta ** state["step"] for beta in group["betas"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        root = (second / second_bias).sqrt_().add_(group["eps"])
        parameter.addcdiv_(first, root, value=-group["lr"] / first_bias)

    def _read(self, state: dict[str, Any], name: str, parameter: Tensor) -> Tensor:
        if name not in state:
            return torch.zeros_like(parameter)
        if parameter.numel() < LEAST:
            moment: Tensor = state[name]
            return moment
        return self._moments[name].decode(state[name], state[f"{name}_scales"]).view_as(parameter)

    def _write(self, state: dict[str, Any], name: str, moment: Tensor) -> None:
        if moment.numel() < LEAST:
            state[name] = moment
        else:
            state[name], state[f"{name}_scales"] = self._moments[name].encode(moment.view(-1))


def _bytes_again(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for name in ("first", "second"):
            if f"{name}_scales" in state:
                state[name] = state[name].to(torch.uint8)


def build(config: AdamWConfig, trainable: Trainable) -> AdamW8:
    """Factory of the optimizer ``adamw8``: all float parameters of ``trainable``; only matrices
    decay.
    """
    groups = float_groups("adamw8", trainable, config.weight_decay)
    return AdamW8(groups, config.lr, (config.beta1, config.beta2), config.eps)


@hookimpl
def arb_register_optimizers() -> Sequence[OptimizerSpec]:
    return (
        OptimizerSpec(
            name="adamw8",
            target="ladder_adamw8:build",
            config="arb_ternary_train.optim.adamw:AdamWConfig",
            accepts=frozenset({"float"}),
            summary="AdamW with both moments in 8 bits, by blocks of 256",
        ),
    )
