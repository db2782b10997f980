"""Build a rack stack by stack, each stack at either end, in its own precision and with adapters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import attrs

from arb_ternary.errors import UsageProblem
from arb_ternary_progressive.adapters import PROGRESSIVE, STACK, AdapterSpec
from arb_ternary_progressive.config import BuildingMode, GrowthConfig, Precision
from arb_ternary_progressive.precision import native_precision
from arb_ternary_progressive.rack import DecoderRack, Rack, as_rack
from arb_ternary_progressive.rack_storage import load_rack, write_rack
from arb_ternary_progressive.stack import (
    Stack,
    check_precision,
    count_learning,
    seeded_birth,
    stack_adapter,
)
from arb_ternary_progressive.stackwise import ModelConfig, StackWiseConfig
from arb_ternary_progressive.time_embedding import TimeEmbedding
from arb_ternary_text.models.transformer import Transformer


class TooManyStacks(UsageProblem, ValueError):
    """Raised for a stack beyond ``max_stacks``."""


class ProgressiveRackBuilder:
    """Makes the stacks of one rack.

    The config is read when it is needed: an assignment to it applies to the stacks that follow.
    Embedding, head and time embedding are made with the first stack, or by :meth:`build_rack`.

    Positions count in the order in which stacks run, from 0; ids count in the order of building. A
    position changes when a stack is put in front, an id never does.

    Args:
        config: model and training; None = ``model``, and defaults for the rest.
        building_mode: where :meth:`add_stack` puts stacks; None = as in the config.
        default_precision: precision of stacks for which none is given; None =
            ``new_stack_precision`` of the config.
        seed: seed of the weights of new stacks; None = that of the config.
        model: options of :class:`ModelConfig` instead of a config; ``vocab_size`` and ``d_model``
            are required.

    Raises:
        UsageProblem: neither a config nor ``vocab_size`` and ``d_model`` are given, or both; an
            unknown mode or precision.
    """

    def __init__(
        self,
        config: StackWiseConfig | None = None,
        building_mode: BuildingMode | None = None,
        default_precision: Precision | None = None,
        *,
        seed: int | None = None,
        **model: Any,
    ) -> None:
        # As in the guide, None leaves an option to the default.
        model = {name: value for name, value in model.items() if value is not None}
        if config is not None and model:
            raise UsageProblem(
                f"builder: {', '.join(model)} given together with a config, which has its own"
            )
        if config is None and not {"vocab_size", "d_model"} <= model.keys():
            raise UsageProblem("builder: needs a config, or vocab_size and d_model")
        if building_mode is not None and building_mode not in get_args(BuildingMode):
            raise UsageProblem(f"building_mode: must be append or prepend, not {building_mode!r}")
        if default_precision is not None:
            check_precision(default_precision)
        self.config = StackWiseConfig(model=ModelConfig(**model)) if config is None else config
        self._model_options = model
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
        """Return a builder whose rack has the parts of ``model``; its blocks become stack 0.

        Args:
            model: a decoder, another model with a decoder's blocks, or a rack, which is used as it
                is.
            growth: how the rack grows.
            seed: seed of the weights of new stacks.
            mask_token: id of the mask token; None = the last id of the vocabulary. A rack has its
                own.

        Raises:
            ConfigError: the model has other blocks.
        """
        builder = cls(StackWiseConfig(), seed=seed)
        builder._growth = growth
        if isinstance(model, Rack):
            builder._rack = model
            return builder
        precision = native_precision(model.config.float_parts)
        rack = as_rack(model, precision=precision, mask_token=mask_token, seed=seed)
        builder._embed_time(rack)
        adapter = stack_adapter(growth, 0, precision)
        if adapter is not None:
            rack.add_adapters(rack.newest, STACK, adapter)
        builder._rack = rack
        return builder

    # --- settings

    @property
    def growth(self) -> GrowthConfig:
        """Options of the growth: ``training.progressive`` of the config, or those of a phase."""
        return self.config.training.progressive if self._growth is None else self._growth

    @property
    def building_mode(self) -> BuildingMode:
        """The end of the rack at which :meth:`add_stack` puts stacks."""
        return self._mode or self.growth.building_mode

    @property
    def default_precision(self) -> Precision:
        """The precision of stacks for which none is given."""
        given = self._default_precision or self.growth.new_stack_precision
        return given or native_precision(self.build_rack().config.float_parts)

    @property
    def seed(self) -> int:
        """The seed of the weights of new stacks."""
        return self.config.training.progressive.seed if self._seed is None else self._seed

    def adopt(self, config: StackWiseConfig) -> None:
        """Use ``config`` from now on if the builder was made without one.

        The model options that were given are kept.
        """
        if not self._model_options or self.config.training is config.training:
            return
        model = attrs.evolve(config.model, **self._model_options)
        self.config = StackWiseConfig(model=model, training=config.training)

    # --- building

    def append_stack(
        self,
        n_blocks: int | None = None,
        precision: Precision | None = None,
        adapter: AdapterSpec | None = None,
    ) -> Stack:
        """Put a new stack after the others.

        Args:
            n_blocks: number of blocks; None = ``blocks_per_stack``, or, if that is None too, as
                many as the first stack has.
            precision: format of its linears; None = ``default_precision``.
            adapter: its own adapters; None = as in the config.

        Returns:
            The new stack.

        Raises:
            ValueError: the rack has ``max_stacks`` already.
            UsageProblem: an argument is out of range.
            ConfigError: the config has no rank and alpha for this stack.
        """
        position = len(self.build_rack().ordered_stacks)
        return self._insert(position, n_blocks, precision, adapter)

    def prepend_stack(
        self,
        n_blocks: int | None = None,
        precision: Precision | None = None,
        adapter: AdapterSpec | None = None,
    ) -> Stack:
        """Put a new stack before the others; arguments as in :meth:`append_stack`."""
        return self._insert(0, n_blocks, precision, adapter)

    def add_stack(
        self,
        n_blocks: int | None = None,
        precision: Precision | None = None,
        adapter: AdapterSpec | None = None,
    ) -> Stack:
        """Append or prepend a stack, depending on ``building_mode``."""
        add = self.append_stack if self.building_mode == "append" else self.prepend_stack
        return add(n_blocks, precision, adapter)

    def build_rack(self) -> Rack:
        """Return the rack: always the same object, with the stacks that there are now.

        Raises:
            ConfigError: the config's model is impossible.
        """
        if self._rack is None:
            config = self.config
            config.validate()
            rack = DecoderRack(
                config.decoder_config(self._default_precision),
                config.model.vocab_size,
                mask_token=config.training.progressive.mask_token_id,
                seed=self.seed,
            )
            self._embed_time(rack)
            self._rack = rack
        return self._rack

    def _embed_time(self, rack: Rack) -> None:
        growth = self.growth
        if growth.time_interpretation != "input":
            return
        with seeded_birth(self.seed, "time embedding"):
            made = TimeEmbedding(
                growth.time_embedding_dim,
                growth.time_encoding_type,
                rack.config.width,
                num_time_steps=growth.num_time_steps,
                config=rack.config,
            )
        rack.set_time_embedding(made)

    def _insert(
        self,
        position: int,
        n_blocks: int | None,
        precision: Precision | None,
        adapter: AdapterSpec | None,
    ) -> Stack:
        rack = self.build_rack()
        growth = self.growth
        trunk = rack.ordered_stacks
        if len(trunk) >= growth.max_stacks:
            raise TooManyStacks(
                f"max_stacks: the rack has {len(trunk)} stacks, and {growth.max_stacks} is the "
                "most",
                "Raise max_stacks.",
            )
        # All arguments are checked before anything is made: an error leaves the rack unchanged.
        stored = check_precision(self.default_precision if precision is None else precision)
        spec = adapter or stack_adapter(growth, rack.next_id, stored)
        if n_blocks is None:
            n_blocks = growth.blocks_per_stack
        if n_blocks is None:
            n_blocks = len(rack.stack(0).blocks)

        stack = rack.insert_stack(
            position,
            n_blocks,
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
        """Freeze the stacks at these positions, adapters included; None = all but the newest.

        Raises:
            UsageProblem: there is no such position.
        """
        for stack in self._at(indices):
            stack.set_learning("nothing")

    def freeze_all_but_qlora(self, indices: Sequence[int] | None = None) -> None:
        """Let only adapters learn in the stacks at these positions; None = all but the newest.

        Raises:
            UsageProblem: there is no such position, or a stack there has no adapters; nothing is
                changed then.
        """
        stacks = self._at(indices)
        for stack in stacks:
            stack.check_can_learn("adapters")
        for stack in stacks:
            stack.set_learning("adapters")

    def _at(self, indices: Sequence[int] | None) -> list[Stack]:
        rack = self.build_rack()
        stacks = rack.ordered_stacks
        if indices is None:
            return [stack for stack in stacks if stack is not rack.newest]
        for index in indices:
            if not 0 <= index < len(stacks):
                raise UsageProblem(
                    f"indices: there is no stack at position {index}; the rack has {len(stacks)}"
                )
        return [stacks[index] for index in indices]

    # --- description and files

    def rack_info(self) -> dict[str, Any]:
        """Return totals of the rack, and one entry per stack in the order in which they run."""
        rack = self.build_rack()
        entries: list[dict[str, Any]] = []
        for position, stack in enumerate(rack.ordered_stacks):
            described = stack.describe()
            entries.append(
                {
                    "position": position,
                    "stack_id": described.pop("id"),
                    "n_blocks": described.pop("blocks"),
                    **described,
                    "parameters": stack.count(),
                    "trainable_parameters": count_learning(stack),
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
            "stacks": entries,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rack with all its adapters to one safetensors file, atomically.

        Raises:
            ArbError: it cannot be written.
        """
        write_rack(self.build_rack(), Path(path))

    def load(self, path: str | os.PathLike[str]) -> Rack:
        """Read a rack that :meth:`save` wrote.

        The builder must have the same model and no stacks yet.

        Raises:
            UsageProblem: the rack has stacks.
            CheckpointError: the file is missing, damaged, or of another model.
        """
        rack = self.build_rack()
        if rack.ordered_stacks:
            raise UsageProblem(
                f"builder: it has {len(rack.ordered_stacks)} stacks already",
                "Load into a new builder.",
            )
        load_rack(rack, Path(path))
        return rack
