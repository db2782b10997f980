"""A stack: blocks that are made together, stored in one format, and frozen or trained together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import torch
from attrs import asdict
from torch import Tensor, nn

from arb_ternary.errors import UsageProblem, nearest
from arb_ternary.optim.protocol import collect_trainable
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_progressive.adapters import (
    STACK,
    Adapter,
    AdapterSpec,
    adapted_linears,
    add_adapters,
    merge_adapters,
)
from arb_ternary_progressive.config import PRECISIONS, Base, GrowthConfig, Precision
from arb_ternary_progressive.precision import NVFP4Linear, is_frozen, make_block
from arb_ternary_progressive.stackwise import StackWiseConfig
from arb_ternary_text.models.attention import Positions, make_positions
from arb_ternary_text.models.block import Block
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_train.audit import audit
from arb_ternary_train.seeding import derive_seed

#: The parts of a stack that learn.
Learning: TypeAlias = Literal["all", "adapters", "nothing"]


class Stack(nn.Module):
    """A list of blocks.

    Attributes:
        stack_id: number of the stack in the order of building; it never changes.
        precision: format of its linears.
        base: base of a stack of precision qlora.
        blocks: its blocks, in the order in which they run.
        learning: the parts that learn: all (except a base that is always frozen), its adapters, or
            nothing.

    Args:
        stack_id: see above.
        n_blocks: number of blocks, or the blocks themselves.
        config: options of the model.
        precision, base: see above.

    Raises:
        UsageProblem: there is no such precision, or no block.
    """

    def __init__(
        self,
        stack_id: int,
        n_blocks: int | nn.ModuleList,
        config: DecoderConfig,
        *,
        precision: Precision = "full",
        base: Base = "nvfp4",
    ) -> None:
        super().__init__()
        if isinstance(n_blocks, int) and n_blocks < 1:
            raise UsageProblem(f"n_blocks: a stack has at least 1 block, not {n_blocks}")
        self.stack_id = stack_id
        self.precision: Precision = check_precision(precision)
        self.base: Base = base
        self.learning: Learning = "all"
        self._config = config
        self._adapters: dict[str, AdapterSpec] = {}
        if isinstance(n_blocks, int):
            self.blocks = nn.ModuleList(
                make_block(config, precision, base) for _ in range(n_blocks)
            )
        else:
            self.blocks = n_blocks
        self._apply_learning()

    # --- adapters

    @property
    def adapters(self) -> Mapping[str, AdapterSpec]:
        """Rank, alpha and dtype of its adapters, by the name of the set."""
        return dict(self._adapters)

    def add_adapters(self, name: str, spec: AdapterSpec) -> None:
        """Give every linear an adapter of the set ``name``.

        Raises:
            UsageProblem: the stack has that set already.
        """
        if name in self._adapters:
            raise UsageProblem(f"stack {self.stack_id}: it has the adapters {name!r} already")
        for block in self._blocks():
            add_adapters(block, name, spec, self._config)
        self._adapters[name] = spec
        self._apply_learning()

    def adapter_modules(self, name: str | None = None) -> list[Adapter]:
        """Return the adapters of a set, or of all sets."""
        found = [
            adapter
            for linear in adapted_linears(self)
            for key, adapter in linear.adapters.items()
            if name in (None, key)
        ]
        return [adapter for adapter in found if isinstance(adapter, Adapter)]

    def merge_adapters(self) -> None:
        """Merge the adapters of every linear into one float32 matrix; the precision becomes full.

        A stack without adapters is unchanged.
        """
        if not self._adapters:
            return
        for block in self._blocks():
            merge_adapters(block)
        self._adapters.clear()
        self.precision = "full"
        self._apply_learning()

    # --- what learns

    @property
    def can_learn(self) -> bool:
        """Whether anything in it can learn: a base that is not always frozen, or adapters."""
        return bool(self._adapters) or not is_frozen(self.precision)

    def check_can_learn(self, learning: Learning) -> None:
        """Raise UsageProblem if ``learning`` asks for something that the stack does not have."""
        if learning == "adapters" and not self._adapters:
            raise UsageProblem(
                f"stack {self.stack_id}: only its adapters can learn, and it has none",
                "Set qlora_enabled or progressive_qlora, or freeze the stack.",
            )
        if learning == "all" and not self.can_learn:
            raise UsageProblem(
                f"stack {self.stack_id}: a base of precision {self.precision} cannot learn, and "
                f"the stack has no adapters",
                "Use precision qlora, or set qlora_enabled.",
            )

    def set_learning(self, learning: Learning) -> None:
        """Set what learns from now on.

        Raises:
            UsageProblem: the stack has nothing of the kind that could learn.
        """
        self.check_can_learn(learning)
        self.learning = learning
        self._apply_learning()

    def _apply_learning(self) -> None:
        set_learning(self, self.learning == "all" and not is_frozen(self.precision))
        for adapter in self.adapter_modules():
            set_learning(adapter, self.learning != "nothing")

    # --- description

    def count(self) -> int:
        """Return the number of its weights, in whatever format they are stored."""
        packed = [part for part in self.modules() if isinstance(part, NVFP4Linear)]
        return audit(self).parameters + sum(part.out_features * part.in_features for part in packed)

    def describe(self) -> dict[str, Any]:
        """Return what is needed to make a stack of the same structure: numbers and text."""
        return {
            "id": self.stack_id,
            "blocks": len(self.blocks),
            "precision": self.precision,
            "base": self.base,
            "learning": self.learning,
            # A list, because the order in which adapters are added to the output decides its
            # last bit.
            "adapters": [{"set": name, **asdict(spec)} for name, spec in self._adapters.items()],
        }

    # --- by itself

    def forward(self, x_BSD: Tensor, positions: Positions | None = None) -> Tensor:
        """Return the residual stream ``[B, S, D]`` after its blocks.

        Without ``positions``, the input has whole sequences.
        """
        if positions is None:
            config = self._config
            positions = make_positions(
                config, x_BSD, start=0, total=x_BSD.size(1), window=config.sliding_window
            )
        for block in self.blocks:
            x_BSD = block(x_BSD, positions)
        return x_BSD

    def extra_repr(self) -> str:
        sets = ", ".join(f"{name}: {spec}" for name, spec in self._adapters.items())
        return (
            f"stack_id={self.stack_id}, precision={self.precision}, learning={self.learning}, "
            f"adapters=({sets})"
        )

    def _blocks(self) -> Iterator[Block]:
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block


def check_precision(precision: str) -> Precision:
    """Return ``precision``, or raise UsageProblem if there is no such precision."""
    for known in PRECISIONS:
        if precision == known:
            return known
    close = nearest(str(precision), PRECISIONS)
    raise UsageProblem(
        f"precision: must be one of {', '.join(PRECISIONS)}, not {precision!r}",
        f"did you mean {close!r}?" if close else "",
    )


def count_learning(module: nn.Module) -> int:
    """Return how many weights of ``module`` learn."""
    trainable = collect_trainable(module)
    total = sum(parameter.numel() for parameter in trainable.floats.values())
    for ternary in trainable.ternary.values():
        total += ternary.shape.out_features * ternary.shape.in_features
    return total


def set_learning(module: nn.Module, learns: bool) -> None:
    """Let everything in ``module`` learn, or nothing.

    A frozen module stays the same bit for bit: its float parameters get no gradient, its trits no
    votes. Gradients that it had are dropped, because an existing optimizer would still apply them.
    """
    for parameter in module.parameters():
        parameter.requires_grad_(learns)
        if not learns:
            parameter.grad = None
    for part in module.modules():
        if isinstance(part, TernaryModule):
            part.frozen = not learns


@contextmanager
def seeded_birth(*parts: int | str) -> Iterator[None]:
    """Make the weights of everything inside depend on ``parts`` alone.

    The global generator is restored afterwards.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(*parts))
        yield


def stack_adapter(config: GrowthConfig, stack_id: int, precision: Precision) -> AdapterSpec | None:
    """Return the adapters that the config gives a new stack; None if it gives none.

    A stack of precision qlora always has some.
    """
    if not (config.qlora_enabled or precision == "qlora"):
        return None
    rank, alpha = config.adapter_size(stack_id)
    return AdapterSpec(rank, alpha, config.adapter_dtype)


def create_stack_from_config(stack_id: int, n_blocks: int, config: StackWiseConfig) -> Stack:
    """Return a stack like the builder makes it: with precision, adapters and seed of the config.

    Raises:
        ConfigError: options contradict each other.
        UsageProblem: there is no block.
    """
    config.validate()
    progressive = config.training.progressive
    precision = progressive.new_stack_precision
    with seeded_birth(progressive.seed, "stack", stack_id):
        stack = Stack(
            stack_id,
            n_blocks,
            config.decoder_config(),
            precision=precision,
            base=progressive.qlora_base,
        )
    adapter = stack_adapter(progressive, stack_id, precision)
    if adapter is not None:
        with seeded_birth(progressive.seed, STACK, stack_id):
            stack.add_adapters(STACK, adapter)
    return stack
