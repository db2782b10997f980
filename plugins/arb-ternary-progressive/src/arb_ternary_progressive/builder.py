"""Builds a rack stack by stack, in front or behind, each in its own precision and with its own
adapters.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from arb_ternary.errors import UsageProblem, nearest
from arb_ternary_progressive.adapters import PROGRESSIVE, STACK, AdapterSpec
from arb_ternary_progressive.config import ModelConfig, StackWiseConfig
from arb_ternary_progressive.growth_config import PRECISIONS, GrowthConfig, Precision
from arb_ternary_progressive.precision import native_precision
from arb_ternary_progressive.rack import Rack
from arb_ternary_progressive.rack_storage import load_into, read_rack, write_rack
from arb_ternary_progressive.racks import DecoderRack, as_rack
from arb_ternary_progressive.stack import (
    GivenAdapter,
    Stack,
    chosen_adapter,
    seeded_birth,
    stack_adapter,
)
from arb_ternary_progressive.time_embedding import TimeEmbedding
from arb_ternary_text.models.transformer import Transformer

#: Where stacks go.
Mode = Literal["append", "prepend"]


class TooManyStacks(UsageProblem, ValueError):
    """A stack more than ``max_stacks``."""


class ProgressiveRackBuilder:
    """Makes the stacks of one rack.

    The config is read when it is needed: what is assigned to it counts for the stacks that follow.
    Embedding, head and time embedding are made with the first stack, or by :meth:`build_rack`.

    Positions count in the order in which stacks run, from 0; ids in the order of building. A
    position changes when something is put in front, an id never does.

    Args:
        config: model and training. None = the keywords, and defaults for the rest.
        building_mode: where :meth:`add_stack` puts stacks; None = as the config says.
        default_precision: of stacks for which none is given; None = the config's
            ``new_stack_precision``.
        vocab_size, d_model, d_ff, n_heads, n_kv_heads, max_length: of the model, in place of a
            config.
        seed: of stacks at birth; None = the config's.

    Raises:
        UsageProblem: neither config nor ``vocab_size`` and ``d_model`` are given, or both; an
            unknown mode or precision.
    """

    def __init__(
        self,
        config: StackWiseConfig | None = None,
        building_mode: Mode | None = None,
        default_precision: Precision | None = None,
        *,
        vocab_size: int | None = None,
        d_model: int | None = None,
        d_ff: int | None = None,
        n_heads: int | None = None,
        n_kv_heads: int | None = None,
        max_length: int | None = None,
        seed: int | None = None,
    ) -> None:
        keywords: dict[str, Any] = {
            "vocab_size": vocab_size,
            "d_model": d_model,
            "d_ff": d_ff,
            "n_heads": n_heads,
            "n_kv_heads": n_kv_heads,
            "max_length": max_length,
        }
        self._given = {key: value for key, value in keywords.items() if value is not None}
        if config is not None and self._given:
            raise UsageProblem(
                f"builder: {', '.join(self._given)} given beside a config, which says it already"
            )
        if config is None and not {"vocab_size", "d_model"} <= self._given.keys():
            raise UsageProblem("builder: needs a config, or vocab_size and d_model")
        if building_mode not in (None, "append", "prepend"):
            raise UsageProblem(f"building_mode: must be append or prepend, not {building_mode!r}")
        if default_precision is not None:
            _check_precision(default_precision)
        self.config = (
            StackWiseConfig(model=ModelConfig(**self._given)) if config is None else config
        )
        self._growth: GrowthConfig | None = None
        self._mode = building_mode
        self._default_precision = default_precision
        self._seed = seed
        self._rack: Rack | None = None

    @classmethod
    def from_model(
        cls,
        model: Transformer,
        growth: GrowthConfig,
        *,
        seed: int = 0,
        mask_token: int | None = None,
    ) -> ProgressiveRackBuilder:
        """A builder whose rack has the parts of ``model``; its blocks become stack 0. A rack goes
        on as it is.

        Args:
            model: a decoder, another model with a decoder's blocks, or a rack.
            growth: how the rack grows.
            seed: of stacks at birth.
            mask_token: what stands for a hidden token; None = the last id of the vocabulary. A rack
                has its own.

        Raises:
            ConfigError: its blocks are others.
        """
        builder = cls(StackWiseConfig(), seed=seed)
        builder._growth = growth
        if isinstance(model, Rack):
            builder._rack = model
            return builder
        precision = native_precision(model.config.float_parts)
        rack = as_rack(
            model,
            precision=precision,
            time_embedding=builder._time_embedding(model),
            mask_token=mask_token,
            seed=seed,
        )
        adapter = stack_adapter(growth, 0, precision)
        if adapter is not None:
            rack.add_adapters(rack.newest, STACK, adapter)
        builder._rack = rack
        return builder

    # --- what it goes by

    @property
    def growth(self) -> GrowthConfig:
        """How the rack grows: the config's section ``training.progressive``, or the options of a
        phase.
        """
        return self.config.training.progressive if self._growth is None else self._growth

    @property
    def building_mode(self) -> Mode:
        """Where :meth:`add_stack` puts stacks."""
        return self._mode or self.growth.building_mode

    @property
    def default_precision(self) -> Precision:
        """The precision of stacks for which none is given."""
        given = self._default_precision or self.growth.new_stack_precision
        return given or native_precision(self.build_rack().config.float_parts)

    @property
    def seed(self) -> int:
        """The seed of stacks at birth."""
        return self.config.training.progressive.seed if self._seed is None else self._seed

    def adopt(self, config: StackWiseConfig) -> None:
        """Go by ``config`` from now on, if the builder was made without one. What the keywords said
        stays.
        """
        if not self._given or self.config.training is config.training:
            return
        self.config = StackWiseConfig(
            model=attrs.evolve(config.model, **self._given), training=config.training
        )

    # --- building

    def append_stack(
        self,
        n_blocks: int | None = None,
        precision: Precision | None = None,
        adapter: GivenAdapter = None,
    ) -> Stack:
        """Put a new stack behind the others.

        Args:
            n_blocks: its blocks; None = ``blocks_per_stack``, or, where that is None, as many as
                the first stack has.
            precision: what its linears are stored in; None = ``default_precision``.
            adapter: its own adapters: a spec or ``{"rank": ..., "alpha": ...}``; True or False in
                place of ``qlora_enabled``; None = as the config says.

        Returns:
            The new stack.

        Raises:
            ValueError: the rack has ``max_stacks`` already.
            UsageProblem: an argument is out of range.
            ConfigError: the config has no rank and alpha for this stack.
        """
        return self._add(len(self.build_rack().ordered_stacks), n_blocks, precision, adapter)

    def prepend_stack(
        self,
        n_blocks: int | None = None,
        precision: Precision | None = None,
        adapter: GivenAdapter = None,
    ) -> Stack:
        """Put a new stack before the others; as :meth:`append_stack`."""
        return self._add(0, n_blocks, precision, adapter)

    def add_stack(
        self,
        n_blocks: int | None = None,
        precision: Precision | None = None,
        adapter: GivenAdapter = None,
    ) -> Stack:
        """Append or prepend, as ``building_mode`` says."""
        add = self.append_stack if self.building_mode == "append" else self.prepend_stack
        return add(n_blocks, precision, adapter)

    def build_rack(self) -> Rack:
        """The rack: always the same object, with the stacks there are now.

        Raises:
            ConfigError: the config's model is impossible.
        """
        if self._rack is None:
            self.config.validate()
            config = self.config
            progressive = self.config.training.progressive
            rack = DecoderRack(
                config.decoder_config(self._default_precision),
                config.model.vocab_size,
                mask_token=progressive.mask_token_id,
                seed=self.seed,
            )
            rack.set_time_embedding(self._time_embedding(rack))
            self._rack = rack
        return self._rack

    def _time_embedding(self, model: Transformer) -> TimeEmbedding | None:
        growth = self.growth
        if growth.time_interpretation != "input":
            return None
        with seeded_birth(self.seed, "time embedding"):
            return TimeEmbedding(
                growth.time_embedding_dim,
                growth.time_encoding_type,
                model.config.width,
                num_time_steps=growth.num_time_steps,
                config=model.config,
            )

    def _add(
        self,
        position: int,
        n_blocks: int | None,
        precision: Precision | None,
        adapter: GivenAdapter,
    ) -> Stack:
        rack = self.build_rack()
        growth = self.growth
        trunk = rack.ordered_stacks
        if len(trunk) >= growth.max_stacks:
            raise TooManyStacks(
                f"max_stacks: the rack has {len(trunk)} stacks, and {growth.max_stacks} is the "
                f"most",
                "Raise max_stacks.",
            )
        stored = _check_precision(self.default_precision if precision is None else precision)
        # Before anything is made: a fault must leave the rack as it was.
        spec = chosen_adapter(adapter, growth, rack.next_id, stored)
        if n_blocks is None:
            n_blocks = growth.blocks_per_stack
        stack = rack.insert_stack(
            position,
            len(rack.stack(0).blocks) if n_blocks is None else n_blocks,
            precision=stored,
            base=growth.qlora_base,
            zero_residual=growth.zero_residual,
        )
        if spec is not None:
            rack.add_adapters(stack, STACK, spec)
        if growth.progressive_qlora:
            second = AdapterSpec(
                growth.progressive_qlora_rank, growth.progressive_qlora_alpha, growth.adapter_dtype
            )
            for other in trunk:
                if PROGRESSIVE not in other.adapters:
                    rack.add_adapters(other, PROGRESSIVE, second)
        return stack

    # --- what learns

    def freeze_trunk(self, indices: Sequence[int] | None = None) -> None:
        """Let nothing learn in the stacks at these positions, adapters included; None = all but the
        newest.

        Raises:
            UsageProblem: there is no such position.
        """
        for stack in self._at(indices):
            stack.set_learning("nothing")

    def freeze_all_but_qlora(self, indices: Sequence[int] | None = None) -> None:
        """Let only the adapters learn in the stacks at these positions; None = all but the newest.

        Raises:
            UsageProblem: there is no such position, or a stack there has no adapters; nothing is
                then changed.
        """
        stacks = self._at(indices)
        for stack in stacks:
            if not stack.adapters:
                stack.set_learning("adapters")
        for stack in stacks:
            stack.set_learning("adapters")

    def unfreeze(self, indices: Sequence[int] | None = None) -> None:
        """Let everything learn in the stacks at these positions, but for bases that never do; None
        = the newest.

        Raises:
            UsageProblem: there is no such position, or a stack there has nothing that can learn.
        """
        rack = self.build_rack()
        for stack in [rack.newest] if indices is None else self._at(indices):
            stack.set_learning("all")

    def _at(self, indices: Sequence[int] | None) -> list[Stack]:
        stacks = self.build_rack().ordered_stacks
        if indices is None:
            return [stack for stack in stacks if stack is not self.build_rack().newest]
        for index in indices:
            if not 0 <= index < len(stacks):
                raise UsageProblem(
                    f"indices: there is no stack at position {index}; the rack has {len(stacks)}"
                )
        return [stacks[index] for index in indices]

    # --- what there is

    def rack_info(self) -> dict[str, Any]:
        """The rack in numbers and text: totals, and one entry a stack, in the order in which they
        run.
        """
        rack = self.build_rack()
        entries = []
        for position, stack in enumerate(rack.ordered_stacks):
            entry = stack.describe()
            counts = stack.count()
            entries.append(
                {
                    "position": position,
                    "stack_id": entry.pop("id"),
                    "n_blocks": entry.pop("blocks"),
                    **entry,
                    "parameters": counts.parameters,
                    "trainable_parameters": counts.trainable,
                    "bytes": stack.nbytes(),
                }
            )
        return {
            "building_mode": self.building_mode,
            "max_stacks": self.growth.max_stacks,
            "total_stacks": len(entries),
            "total_blocks": len(rack.blocks),
            "vocab_size": rack.vocabulary_size,
            "d_model": rack.config.width,
            "stack_parameters": sum(entry["parameters"] for entry in entries),
            "trainable_stack_parameters": sum(entry["trainable_parameters"] for entry in entries),
            "bytes": sum(tensor.nbytes for tensor in (*rack.parameters(), *rack.buffers())),
            "stacks": entries,
        }

    def structure(self) -> dict[str, Any]:
        """What the rack is made of, for a checkpoint: numbers, text, lists and dicts."""
        return self.build_rack().structure()

    def restore(self, structure: Mapping[str, Any]) -> None:
        """Make the stacks and adapters of :meth:`structure` that the rack does not have; weights
        come after.

        Raises:
            CheckpointError: the rack has stacks that ``structure`` has not.
        """
        self.build_rack().restore_structure(structure)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rack with all its adapters to one safetensors file, atomically.

        Raises:
            CheckpointError: it cannot be written.
        """
        write_rack(self.build_rack(), Path(path))

    def load(self, path: str | os.PathLike[str]) -> Rack:
        """Read a rack that :meth:`save` wrote. The builder must have the same model and no stacks
        yet.

        Raises:
            UsageProblem: the rack has stacks.
            CheckpointError: the file is missing, damaged, or of another model.
        """
        rack = self.build_rack()
        if rack.ordered_stacks:
            raise UsageProblem(
                f"builder: it has {len(rack.ordered_stacks)} stacks already",
                "Load into a fresh one.",
            )
        load_into(rack, read_rack(Path(path)))
        return rack

    def merge_adapters(self) -> Rack:
        """A copy of the rack without adapters, for export: what they add is in the weights."""
        return self.build_rack().merged()


def _check_precision(precision: str) -> Precision:
    if precision not in PRECISIONS:
        close = nearest(str(precision), PRECISIONS)
        hint = f"did you mean {close!r}?" if close else ""
        raise UsageProblem(
            f"precision: must be one of {', '.join(PRECISIONS)}, not {precision!r}", hint
        )
    return precision
