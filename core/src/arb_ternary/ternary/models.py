"""The ternary modules of a model, and those with integer weights of another format: find, seed or
reset them.
"""

from __future__ import annotations

from typing import Protocol, cast

from torch import Tensor, nn

from arb_ternary.counters.hashing import SEED, STREAM, stream_id
from arb_ternary.ternary.module import TernaryModule


class StoredWeights(Protocol):
    """A ``torch.nn.Module`` of another distribution that stores integer weights in a format of its
    own.

    Core gives its counter hash the run's seed, and hands it to the optimizers that declare
    ``accepts={"stored"}``; the audit of training counts its weights. How it gets its gradient is
    its own affair. Its integer buffers, ``control`` apart, hold the weights and what belongs to
    them.

    Attributes:
        stored_weights: how many weights the module itself (without its children) stores.
        gradient_bytes: what the module keeps of a gradient from backward to the optimizer's step.
        frozen: the weights do not learn.
        control: int64 buffer ``[4]``, see :mod:`arb_ternary.counters.hashing`.
    """

    stored_weights: int
    gradient_bytes: int
    frozen: bool
    control: Tensor

    def codes(self) -> Tensor:
        """The weights as whole numbers, ``[N, K]``; an optimizer's ``flips`` count those that
        changed.
        """


def ternary_modules(model: nn.Module) -> list[tuple[str, TernaryModule]]:
    """Name and module of every ternary module, each once, in the order of ``named_modules``."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, TernaryModule)
    ]


def stored_modules(model: nn.Module) -> list[tuple[str, StoredWeights]]:
    """Name and module of all :class:`StoredWeights` in ``model``, each once."""
    return [
        (name, cast("StoredWeights", module))
        for name, module in model.named_modules()
        if is_stored(module)
    ]


def is_stored(module: nn.Module) -> bool:
    """Whether ``module`` is one of :class:`StoredWeights`."""
    return isinstance(getattr(module, "stored_weights", None), int)


def seed_votes(model: nn.Module, seed: int) -> None:
    """Give every ternary module and all :class:`StoredWeights` the run's seed and the stream of the
    qualified name.

    Two modules never share a stream unless their names share a CRC-32; a name keeps its stream on
    every machine.
    """
    modules: list[tuple[str, TernaryModule | StoredWeights]] = [
        *ternary_modules(model),
        *stored_modules(model),
    ]
    for name, module in modules:
        module.control[SEED] = seed
        module.control[STREAM] = stream_id(name)


def reset_runtime_state(model: nn.Module) -> None:
    """Clear what modules carry from one batch to the next (KV caches, sliding windows).

    Call it between randomly sampled batches; keep the state only for text that is streamed in
    order.
    """
    for module in model.modules():
        reset = getattr(module, "reset_runtime_state", None)
        if callable(reset):
            reset()
