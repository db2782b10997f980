"""Modules of other distributions that store integer weights in a format of their own.

Such a module says so with the attribute ``stored_weights``. Core then counts its weights in the audit, gives its
counter hash the run's seed, and hands it to the optimizers that declare ``accepts={"stored"}``. How it gets its
gradient is its own affair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["StoredWeights", "is_stored", "stored_modules"]


class StoredWeights(Protocol):
    """What a module with ``stored_weights`` has, besides being a ``torch.nn.Module``.

    Its integer buffers, ``control`` apart, hold the weights and what belongs to them.

    Attributes:
        stored_weights: how many weights the module itself (without its children) stores.
        gradient_bytes: what the module keeps of a gradient from backward to the optimizer's step.
        frozen: the weights do not learn.
        control: int64 buffer ``[4]``, see :mod:`arb_ternary.counters.control`.
    """

    stored_weights: int
    gradient_bytes: int
    frozen: bool
    control: Tensor

    def codes(self) -> Tensor:
        """The weights as whole numbers, ``[N, K]``; an optimizer's ``flips`` count those that changed."""


def stored_modules(model: nn.Module) -> list[tuple[str, StoredWeights]]:
    """Name and module of everything in ``model`` that has ``stored_weights``, each once."""
    return [(name, cast("StoredWeights", module)) for name, module in model.named_modules() if is_stored(module)]


def is_stored(module: nn.Module) -> bool:
    """Whether ``module`` is one of :class:`StoredWeights`."""
    return isinstance(getattr(module, "stored_weights", None), int)
