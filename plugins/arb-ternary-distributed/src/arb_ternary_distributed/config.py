"""Distributed training from Python: a config with the names of guides, and the rank of a process.

``arb train`` needs none of this when ``torchrun`` starts it. In a program that ``torchrun``
starts::

    config = load_config("arb.yaml").config
    config = DistributedConfig(strategy=DistributedStrategy.DDP).applied_to(config)
    report = train(config, RunRequest(directory=Path("runs/mine"), resume="auto"))
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import attrs
from attrs import evolve, field, frozen

from arb_ternary.errors import ConfigError
from arb_ternary_train.launcher import launched_process

if TYPE_CHECKING:
    from arb_ternary_train.config import RunConfig


class DistributedStrategy(Enum):
    """The distribution of what training keeps. With both, each rank owns rows of the accumulators.

    ``DDP``: every rank keeps the sums of votes of all rows. ``FSDP``: each rank keeps those of its
    own rows. Packed weights, two bits each, are on every rank.
    """

    DDP = "ddp"
    FSDP = "fsdp"


@frozen(kw_only=True)
class DistributedConfig:
    """How several processes train one model, with the names of guides for DDP and FSDP.

    Gradients are summed in the order of micro-batches and votes as integers, so that the trained
    bytes are those of one process, whatever the strategy and the number of processes.

    Args:
        strategy: where sums of votes are.
        ddp_find_unused_parameters: whether a micro-batch may leave parameters without a gradient.
            It always may, which costs nothing.
        fsdp_sharding_strategy: ``FULL_SHARD``.
        fsdp_mixed_precision: whether forward passes run under autocast to bfloat16.
        fsdp_activation_checkpointing: whether backward computes activations again.
        fsdp_transformer_layer_cls: names of the modules that FSDP would wrap. None is wrapped, so
            any names will do.

    Raises:
        ConfigError: an option is not supported, or belongs to the other strategy.
    """

    strategy: DistributedStrategy = field(
        default=DistributedStrategy.DDP, converter=DistributedStrategy
    )
    ddp_find_unused_parameters: bool = False
    fsdp_sharding_strategy: str = "FULL_SHARD"
    fsdp_mixed_precision: bool = False
    fsdp_activation_checkpointing: bool = False
    fsdp_transformer_layer_cls: Sequence[str] = field(default=(), converter=tuple)

    def __attrs_post_init__(self) -> None:
        other = "ddp_" if self.strategy is DistributedStrategy.FSDP else "fsdp_"
        for option in attrs.fields(type(self)):
            value = getattr(self, option.name)
            if option.name.startswith(other) and value != option.default:
                raise ConfigError(
                    f"{option.name}: {value!r} has no effect with "
                    f"DistributedStrategy.{self.strategy.name}",
                    f"Leave {option.name} out.",
                )
        if self.fsdp_sharding_strategy != "FULL_SHARD":
            raise ConfigError(
                f"fsdp_sharding_strategy: {self.fsdp_sharding_strategy!r} is not supported: rows "
                f"are divided among all ranks",
                'Use fsdp_sharding_strategy="FULL_SHARD", or DistributedStrategy.DDP.',
            )

    def applied_to(self, config: RunConfig) -> RunConfig:
        """Return the config of a run with these options set.

        Raises:
            ConfigError: a phase has no such option.
        """
        changes: dict[str, Any] = {}
        if self.fsdp_mixed_precision:
            changes |= {"use_amp": True, "amp_dtype": "bfloat16"}
        if self.fsdp_activation_checkpointing:
            changes |= {"activation_checkpointing": True}
        weights: Literal["replicated", "sharded"] = "replicated"
        if self.strategy is DistributedStrategy.FSDP:
            weights = "sharded"
        phases = config.phases
        if changes:
            phases = tuple(_with_options(phase, changes) for phase in config.phases)
        return evolve(config, phases=phases, ranks=evolve(config.ranks, weights=weights))


def _with_options(phase: Any, changes: dict[str, Any]) -> Any:
    """Return the choice of a phase with some options changed."""
    for name in changes:
        if not hasattr(phase.options, name):
            raise ConfigError(
                f"phase '{phase.name}' has no option {name!r}, which an fsdp option sets"
            )
    return evolve(
        phase,
        options=evolve(phase.options, **changes),
        given=phase.given | changes.keys(),
    )


def is_distributed() -> bool:
    """Return whether this process is one of several, started by torchrun or srun."""
    return get_world_size() > 1


def get_rank() -> int:
    """Return the number of this process among all, from 0; 0 if there is one process."""
    return _rank_and_size()[0]


def get_world_size() -> int:
    """Return the number of processes."""
    return _rank_and_size()[1]


def is_main_process() -> bool:
    """Return whether this is rank 0, which owns the run's directory and prints."""
    return get_rank() == 0


def _rank_and_size() -> tuple[int, int]:
    # If torch is not loaded, no group has been initialised; loading it would take seconds.
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    process = launched_process()
    return (0, 1) if process is None else (process.rank, process.size)
