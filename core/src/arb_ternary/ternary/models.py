"""Find, seed and reset the ternary modules of a model, and modules with other integer weights."""

from __future__ import annotations

from typing import Protocol, cast

from torch import Tensor, nn

from arb_ternary.counters.hashing import SEED, STREAM, stream_id
from arb_ternary.ternary.module import TernaryModule


class StoredWeights(Protocol):
    """A ``torch.nn.Module`` of another distribution with integer weights in a format of its own.

    Core gives the seed of the run to its counter hash, and passes it to the optimizers that declare
    ``accepts={"stored"}``. The audit of training counts its weights. The module obtains its
    gradient itself. Its integer buffers, except ``control``, hold the weights and their state.

    Attributes:
        stored_weights: number of weights that the module itself (without its children) stores.
        gradient_bytes: bytes of a gradient that the module keeps from backward to the step of the
            optimizer.
        frozen: whether the weights do not learn.
        control: int64 buffer ``[4]``, see :mod:`arb_ternary.counters.hashing`.
    """

    stored_weights: int
    gradient_bytes: int
    frozen: bool
    control: Tensor

    def codes(self) -> Tensor:
        """Return the weights as whole numbers ``[N, K]``.

        The ``flips`` of an optimizer count those that changed.
        """


def ternary_modules(model: nn.Module) -> list[tuple[str, TernaryModule]]:
    """Return name and module of every ternary module, once, in the order of ``named_modules``."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, TernaryModule)
    ]


def stored_modules(model: nn.Module) -> list[tuple[str, StoredWeights]]:
    """Return name and module of every module with :class:`StoredWeights`, once."""
    return [
        (name, cast("StoredWeights", module))
        for name, module in model.named_modules()
        if is_stored(module)
    ]


def is_stored(module: nn.Module) -> bool:
    """Whether ``module`` has :class:`StoredWeights`."""
    return isinstance(getattr(module, "stored_weights", None), int)


def seed_votes(model: nn.Module, seed: int) -> None:
    """Give every module with integer weights the seed of the run, and the stream of its name.

    Two modules share a stream only if their qualified names have the same CRC-32. A name has the
    same stream on every machine.
    """
    modules: list[tuple[str, TernaryModule | StoredWeights]] = [
        *ternary_modules(model),
        *stored_modules(model),
    ]
    for name, module in modules:
        module.control[SEED] = seed
        module.control[STREAM] = stream_id(name)


def reset_runtime_state(model: nn.Module) -> None:
    """Clear the state that modules carry from one batch to the next (KV caches, sliding windows).

    Call it between randomly sampled batches. Keep the state only for text that is streamed in
    order.
    """
    for module in model.modules():
        reset = getattr(module, "reset_runtime_state", None)
        if callable(reset):
            reset()
