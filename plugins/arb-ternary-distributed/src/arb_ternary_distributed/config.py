"""Training by several processes from a program in Python: a config for it, and who this process is.

``arb train`` needs none of this: started by ``torchrun`` it trains by all processes. In a program
that ``torchrun`` starts::

    config = load_config("arb.yaml").config
    config = DistributedConfig(strategy=DistributedStrategy.DDP).applied_to(config)
    report = train(config, RunRequest(directory=Path("runs/mine"), resume="auto"))
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
from attrs import evolve, field, frozen

from arb_ternary.errors import ConfigError
from arb_ternary_train.launcher import launched_process

if TYPE_CHECKING:
    from arb_ternary_train.config import RunConfig

#: What other programs call the blocks of a decoder, and what ours are called.
_BLOCKS: Final = ("TransformerBlock", "Block")
#: What another sharding strategy of FSDP would be here.
_OTHER_SHARDING: Final = {
    "NO_SHARD": "Use DistributedStrategy.DDP, by which every rank has all weights."
}


class DistributedStrategy(Enum):
    """Where weights are. In both, ranks own the accumulators and the optimizer's state by rows.

    ``DDP``: all on every rank. ``FSDP``: rows of them on each, gathered at two bits a weight while
    a block runs.
    """

    DDP = "ddp"
    FSDP = "fsdp"


@frozen(kw_only=True)
class DistributedConfig:
    """How several processes train one model, with the names that guides for DDP and FSDP use.

    Gradients are summed in the order of micro-batches and votes as integers, so that the trained
    bytes are those of one process, whatever the strategy and the number of processes.

    Args:
        strategy: where weights are.
        ddp_find_unused_parameters: whether a micro-batch may leave parameters without a gradient.
            It always may, which costs nothing.
        fsdp_sharding_strategy: ``FULL_SHARD``.
        fsdp_mixed_precision: forward passes run under autocast to bfloat16.
        fsdp_activation_checkpointing: activations are computed again in backward.
        fsdp_transformer_layer_cls: names of what is gathered at a time; it is always a block.

    Raises:
        ConfigError: an option that cannot be met, or that belongs to the other strategy.
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
            hint = _OTHER_SHARDING.get(
                self.fsdp_sharding_strategy, 'Use fsdp_sharding_strategy="FULL_SHARD".'
            )
            raise ConfigError(
                f"fsdp_sharding_strategy: {self.fsdp_sharding_strategy!r} is not supported: "
                "weights are gathered for forward and again for backward, among all ranks",
                hint,
            )
        strange = [name for name in self.fsdp_transformer_layer_cls if name not in _BLOCKS]
        if strange:
            raise ConfigError(
                f"fsdp_transformer_layer_cls: {strange[0]!r} is not what is gathered at a time, "
                f"which is a block",
                f"Leave it out, or name the blocks: {', '.join(_BLOCKS)}.",
            )

    def applied_to(self, config: RunConfig) -> RunConfig:
        """The config of a run with what this one says: where weights are, autocast, checkpointing
        of activations.

        Raises:
            ConfigError: a phase has no such options.
        """
        changes: dict[str, Any] = {}
        if self.fsdp_mixed_precision:
            changes |= {"use_amp": True, "amp_dtype": "bfloat16"}
        if self.fsdp_activation_checkpointing:
            changes |= {"activation_checkpointing": True}
        weights: Literal["replicated", "sharded"] = "replicated"
        if self.strategy is DistributedStrategy.FSDP:
            weights = "sharded"
        phases = (
            tuple(_changed(phase, changes) for phase in config.phases) if changes else config.phases
        )
        return evolve(config, phases=phases, ranks=evolve(config.ranks, weights=weights))


def _changed(phase: Any, changes: dict[str, Any]) -> Any:
    for name in changes:
        if not hasattr(phase.options, name):
            raise ConfigError(
                f"phase '{phase.name}' has no option {name!r}, which fsdp options of this kind set"
            )
    return evolve(
        phase, options=evolve(phase.options, **changes), given=phase.given | changes.keys()
    )


def is_distributed() -> bool:
    """Whether this process is one of several that a launcher (torchrun, srun) has started, or that
    have joined.
    """
    return get_world_size() > 1


def get_rank() -> int:
    """The number of this process among those, from 0; 0 where it is alone."""
    return _rank_and_size()[0]


def get_world_size() -> int:
    """How many there are."""
    return _rank_and_size()[1]


def is_main_process() -> bool:
    """Whether this is rank 0, which owns the run's directory and prints."""
    return get_rank() == 0


def _rank_and_size() -> tuple[int, int]:
    # Where torch is not loaded no group has been joined, and it need not be loaded to say so.
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    process = launched_process()
    return (0, 1) if process is None else (process.rank, process.size)
