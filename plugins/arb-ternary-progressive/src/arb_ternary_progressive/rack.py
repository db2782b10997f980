"""A rack: embedding, stacks, final norm and head; a model whose blocks are grouped in stacks.

Shapes: ``B`` sequences, ``S`` positions, ``D`` width, ``V`` vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from arb_ternary.counters.hashing import SEED, STREAM, stream_id
from arb_ternary.errors import CheckpointError, ConfigError, UsageProblem
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_progressive.adapters import AdapterSpec
from arb_ternary_progressive.config import Base, Precision
from arb_ternary_progressive.stack import Stack, seeded_birth
from arb_ternary_text.models.block import Block
from arb_ternary_text.models.cache import KeyValueCache
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.transformer import Transformer
from arb_ternary_train.build import undrawn


class Stacks(nn.ModuleList):
    """The stacks of a rack. Iteration yields their blocks in the order in which they run.

    A stack is registered under its id, so that the names of its tensors stay the same when another
    stack is put before it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.order: list[int] = []

    @property
    def stacks(self) -> list[Stack]:
        """The stacks in the order in which they run."""
        found = [self._modules[str(stack_id)] for stack_id in self.order]
        return [stack for stack in found if isinstance(stack, Stack)]

    def insert_stack(self, position: int, stack: Stack) -> None:
        """Put ``stack`` at ``position``, before the stack that is there now."""
        self._modules[str(stack.stack_id)] = stack
        self.order.insert(position, stack.stack_id)

    # nn.ModuleList would show what the list iterates over, not its children.
    __repr__ = nn.Module.__repr__

    def _in_order(self) -> list[nn.Module]:
        return [block for stack in self.stacks for block in stack.blocks]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._in_order())

    def __len__(self) -> int:
        return sum(len(stack.blocks) for stack in self.stacks)

    def __getitem__(self, index: Any) -> Any:
        return self._in_order()[index]


class Rack(Transformer):
    """A model whose blocks are grouped in stacks; its ends are unchanged.

    It can be used wherever the model can: to train, evaluate, export. State names are those of the
    model, with ``blocks.<stack id>.blocks.<number>`` instead of ``blocks.<number>``.
    """

    blocks: Stacks

    def _become_a_rack(self, mask_token: int | None, seed: int) -> None:
        self.mask_token = self.vocabulary_size - 1 if mask_token is None else mask_token
        self.seed = seed
        if not 0 <= self.mask_token < self.vocabulary_size:
            raise UsageProblem(
                f"mask_token_id: must be from 0 to {self.vocabulary_size - 1}, not "
                f"{self.mask_token}",
                "Use an id of the vocabulary that does not occur in the data.",
            )
        self.time_embedding: nn.Module | None = None

    def set_time_embedding(self, time_embedding: nn.Module) -> None:
        """Make time an input: add ``(time) -> [B or 1, 1, D]`` to that of the first stack."""
        before = self._ternary()
        self.time_embedding = time_embedding.to(self._device())
        self._seed_new_votes(before)

    @property
    def takes_time(self) -> bool:
        """Whether time is an input: training and evaluation then pass the times of samples."""
        return self.time_embedding is not None

    @property
    def input_end(self) -> list[nn.Module]:
        """The modules that make the input of the first stack."""
        if self.time_embedding is None:
            return [self.embedding]
        return [self.embedding, self.time_embedding]

    @property
    def output_end(self) -> list[nn.Module]:
        """The modules that make the logits from the output of the last stack."""
        return [self.final_norm, self.head]

    # --- stacks

    @property
    def ordered_stacks(self) -> list[Stack]:
        """The stacks in the order in which they run."""
        return self.blocks.stacks

    @property
    def newest(self) -> Stack:
        """The stack that was made last.

        Raises:
            UsageProblem: there is none.
        """
        if not self.blocks.order:
            raise UsageProblem("rack: it has no stack yet")
        return self.stack(max(self.blocks.order))

    def stack(self, stack_id: int) -> Stack:
        """Return the stack with this id; ValueError if there is none."""
        return self.ordered_stacks[self.position(stack_id)]

    def position(self, stack_id: int) -> int:
        """Return the place of the stack with this id, 0 runs first; ValueError if there is none."""
        return self.blocks.order.index(stack_id)

    @property
    def next_id(self) -> int:
        """The id of the next stack."""
        return max(self.blocks.order, default=-1) + 1

    def insert_stack(
        self,
        position: int,
        n_blocks: int,
        *,
        precision: Precision = "full",
        base: Base = "nvfp4",
        zero_residual: bool = True,
    ) -> Stack:
        """Make a stack and put it at ``position``, before the stack that is there now.

        Its initial weights depend on the rack's seed and its id alone.

        Args:
            position: place of the new stack; the number of stacks = after the last.
            n_blocks: number of blocks.
            precision: format of its linears.
            base: base of a stack of precision qlora.
            zero_residual: the stack starts as the identity.

        Raises:
            UsageProblem: there is no such precision, or no block.
        """
        stack = self._born(self.next_id, n_blocks, precision, base, zero_residual)
        self._insert(position, stack)
        return stack

    def add_adapters(self, stack: Stack, name: str, spec: AdapterSpec) -> None:
        """Give ``stack`` the adapters ``name``.

        Their initial weights depend on seed, id and name alone.

        Raises:
            UsageProblem: the stack has that set already.
        """
        before = self._ternary()
        with seeded_birth(self.seed, name, stack.stack_id):
            stack.add_adapters(name, spec)
        if self._dtype is not None:
            for adapter in stack.adapter_modules(name):
                adapter.to(self._dtype)
        self._seed_new_votes(before)

    def merged(self) -> Rack:
        """Return a copy with the adapters merged into the weights.

        Stacks that had adapters become precision full.
        """
        rack = copy.deepcopy(self)
        rack.reset_runtime_state()
        for stack in rack.ordered_stacks:
            stack.merge_adapters()
        return rack

    # --- structure

    def structure(self) -> dict[str, Any]:
        """Return the structure of the rack in plain values, in the order in which it runs."""
        return {"stacks": [stack.describe() for stack in self.ordered_stacks]}

    def restore_structure(self, structure: Mapping[str, Any]) -> None:
        """Make the stacks and adapters of :meth:`structure` that are missing.

        Weights are loaded later.

        Raises:
            CheckpointError: the rack has parts that ``structure`` does not have.
        """
        wanted = {int(entry["id"]): entry for entry in structure["stacks"]}
        for stack in self.ordered_stacks:
            entry = wanted.get(stack.stack_id)
            found = stack.describe()
            kept = {"id", "blocks", "precision", "base"}
            if entry is None or any(entry[key] != found[key] for key in kept):
                raise CheckpointError(
                    f"rack: it has stack {stack.stack_id} of {found['blocks']} blocks in "
                    f"{stack.precision}, which the saved structure has not"
                )
        # In the order of building, because optimizers number parameters in the order of
        # registration.
        for stack_id, entry in sorted(wanted.items()):
            if stack_id not in self.blocks.order:
                stack = self._born(
                    stack_id, int(entry["blocks"]), entry["precision"], entry["base"], True
                )
                self._insert(len(self.blocks.order), stack)
            stack = self.stack(stack_id)
            for described in entry["adapters"]:
                name = described["set"]
                if name not in stack.adapters:
                    spec = {key: value for key, value in described.items() if key != "set"}
                    self.add_adapters(stack, name, AdapterSpec(**spec))
            if stack.describe()["adapters"] != list(entry["adapters"]):
                raise CheckpointError(
                    f"rack: the adapters of stack {stack_id} are not those of the saved structure"
                )
            stack.set_learning(entry["learning"])
        self.blocks.order = [int(entry["id"]) for entry in structure["stacks"]]

    # --- running

    def forward(
        self,
        inputs: Tensor,
        *,
        hidden: Tensor | None = None,
        from_stack: int = 0,
        time: float | Tensor | None = None,
    ) -> Tensor:
        """Return logits.

        Args:
            inputs: input of the model.
            hidden: the residual stream ``[B, S, D]`` that enters the stack at ``from_stack``, the
                result of :meth:`trunk`; it is used instead of the inputs.
            from_stack: position of the first stack to run.
            time: in [0, 1], one for all or ``[B]``; with a time embedding. None is 0: nothing is
                hidden.

        Raises:
            UsageProblem: the model cannot read the inputs.
        """
        if hidden is not None:
            return self.logits(self.run_stacks(hidden, from_stack))
        return self.logits(self._run(self.embed(inputs, time), self.blocks, None))

    def embed(self, inputs: Tensor, time: float | Tensor | None = None) -> Tensor:
        """Return the residual stream before the first stack, ``[B, S, D]``."""
        return self._timed(super().embed(inputs), time)

    def trunk(self, inputs: Tensor, until_stack: int, time: float | Tensor | None = None) -> Tensor:
        """Return the residual stream ``[B, S, D]`` that enters the stack at ``until_stack``."""
        return self.run_stacks(self.embed(inputs, time), 0, until_stack)

    def run_stacks(self, x_BSD: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """Return the residual stream after the stacks from ``first`` to ``last``.

        ``last`` is exclusive; None = to the end.

        Raises:
            UsageProblem: there are no such positions.
        """
        count = len(self.blocks.order)
        end = count if last is None else last
        if not 0 <= first <= end <= count:
            raise UsageProblem(
                f"stacks {first} to {end}: the rack has {count}, at positions from 0"
            )
        blocks = [block for stack in self.ordered_stacks[first:end] for block in stack.blocks]
        if self._dtype is not None:
            x_BSD = x_BSD.to(self._dtype)
        return self._run(x_BSD, blocks, None)

    def _timed(self, x_BSD: Tensor, time: float | Tensor | None) -> Tensor:
        if self.time_embedding is None:
            if time is not None:
                raise UsageProblem(
                    "time: the rack has no time embedding",
                    "Set time_interpretation to input before the rack is made.",
                )
            return x_BSD
        update: Tensor = self.time_embedding(0.0 if time is None else time)
        return x_BSD + update.to(x_BSD.dtype)

    # --- making stacks

    def _born(
        self, stack_id: int, n_blocks: int, precision: Precision, base: Base, zero_residual: bool
    ) -> Stack:
        config = attrs.evolve(self.config, zero_residual=zero_residual)
        with seeded_birth(self.seed, "stack", stack_id):
            stack = Stack(stack_id, n_blocks, config, precision=precision, base=base)
        if self._dtype is not None:
            stack.to(self._dtype)
        return stack.to(self._device()).train(self.training)

    def _insert(self, position: int, stack: Stack) -> None:
        before = self._ternary()
        self.blocks.insert_stack(position, stack)
        self.config = attrs.evolve(self.config, layers=len(self.blocks))
        self.reset_runtime_state()
        self._seed_new_votes(before)

    def _device(self) -> torch.device:
        part = self.embedding
        return next(iter((*part.parameters(), *part.buffers()))).device

    def _ternary(self) -> tuple[int, ...]:
        return tuple(id(module) for _, module in ternary_modules(self))

    def _seed_new_votes(self, before: Iterable[int]) -> None:
        """Seed the votes of the ternary modules that are not in ``before``, by their names."""
        known = set(before)
        for name, module in ternary_modules(self):
            if id(module) not in known:
                module.control[SEED] = self.seed
                module.control[STREAM] = stream_id(name)


class DecoderRack(Rack, Decoder):
    """A decoder whose blocks are grouped in stacks; it generates with a cache or by unrolling.

    Args:
        config: the options; ``layers`` is ignored and follows from the stacks.
        vocabulary_size: number of token ids.
        mask_token: id of the mask token; None = the last id of the vocabulary.
        seed: seed of new parts, and of the votes of their ternary modules.
    """

    blocks: Stacks

    def __init__(
        self,
        config: DecoderConfig,
        vocabulary_size: int,
        *,
        mask_token: int | None = None,
        seed: int = 0,
    ) -> None:
        with seeded_birth(seed, "rack"):
            super().__init__(config, vocabulary_size, blocks=Stacks())
        self._become_a_rack(mask_token, seed)
        self._seed_new_votes(())

    def forward(
        self,
        tokens_BS: Tensor,
        cache: KeyValueCache | None = None,
        *,
        hidden: Tensor | None = None,
        from_stack: int = 0,
        time: float | Tensor | None = None,
    ) -> Tensor:
        """Return logits ``[B, S, V]``.

        ``cache`` is as in a decoder, the other arguments are as in :class:`Rack`.

        Raises:
            UsageProblem: the sequence exceeds the context.
        """
        if hidden is not None:
            return super().forward(tokens_BS, hidden=hidden, from_stack=from_stack)
        streamed = self._runtime(tokens_BS.size(0)) if cache is None and self.training else cache
        return self.logits(self._run(self.embed(tokens_BS, time), self.blocks, streamed))

    def unroll(self, prompt_ids: Iterable[int], **options: Any) -> Iterator[int]:
        """Sample in one pass; see :func:`arb_ternary_progressive.unroll.unrolled`."""
        from arb_ternary_progressive.unroll import unrolled

        drawn: Iterator[int] = unrolled(self, list(prompt_ids), **options)
        return drawn


def as_rack(
    model: Transformer,
    *,
    precision: Precision,
    mask_token: int | None = None,
    seed: int = 0,
) -> Rack:
    """Return a rack that takes over the parts of ``model``; its blocks become stack 0.

    Args:
        model: not to be used by itself afterwards.
        precision: format of its linears: full or ternary.
        mask_token: id of the mask token; None = the last id of the vocabulary.
        seed: seed of new parts, and of the votes of their ternary modules.

    Raises:
        ConfigError: its blocks are not those that its options describe, so more of them cannot be
            made.
    """
    if not _has_plain_blocks(model):
        raise ConfigError(
            f"model: stacks are made of the blocks of a decoder; a {type(model).__name__} has "
            "others",
            "Use `model: {name: decoder, ...}`.",
        )
    kind: Any = type(model)
    rack_class = _rack_class(kind)
    rack = rack_class.__new__(rack_class)
    rack.__dict__.update({**model.__dict__, "_modules": dict(model._modules)})
    rack._modules["blocks"] = Stacks()
    rack._become_a_rack(mask_token, seed)
    rack._insert(0, Stack(0, model.blocks, model.config, precision=precision))
    return rack


@cache
def _rack_class(model: Any) -> type[Rack]:
    """Return the class of racks of a class of models.

    It embeds inputs, places positions and makes logits like them.
    """
    if model is Decoder:
        return DecoderRack
    base = DecoderRack if issubclass(model, Decoder) else Rack
    return type(
        f"{model.__name__}Rack",
        (base, model),
        {"__doc__": f"A {model.__name__} whose blocks are grouped in stacks."},
    )


def _has_plain_blocks(model: Transformer) -> bool:
    """Return whether the blocks of ``model`` are those that ``Block`` makes from its options."""
    with seeded_birth("plain blocks"), undrawn():
        plain = _kinds(Block(model.config))
    return all(_kinds(block) == plain for block in model.blocks)


def _kinds(module: nn.Module) -> list[tuple[str, type[nn.Module]]]:
    return [(name, type(part)) for name, part in module.named_modules()]
