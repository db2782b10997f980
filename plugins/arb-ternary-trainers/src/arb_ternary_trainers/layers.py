"""The layers of torch with a ternary weight.

``ternarize`` turns a layer into one of these in place: it is the same object, with its name, hooks,
bias and attributes; its class changes, its parameter ``weight`` is replaced by the module
``ternary``, and ``weight`` is computed from that whenever it is read. So a layer is still an
instance of ``nn.Linear``, ``nn.Embedding``, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_trainers.dense_weight import weight_of

#: Attributes that transformers sets after it has resized the weight of an embedding or a head.
_SIZES: Final = ("num_embeddings", "out_features")


class TernaryLayer(nn.Module):
    """A layer whose weight is ternary; it is made by :meth:`adopt`, not by its constructor.

    Attributes:
        ternary: the packed weight and what it learns by. Layers with a tied weight share it. Set
            ``ternary.frozen`` to freeze the weight.
        dense_class: the class of the layer before.
        dense_shape: the shape of ``weight``.
        compute_dtype: the dtype of ``weight``. It follows ``model.to(dtype)``, as that of a
            parameter does.
    """

    ternary: TernaryModule
    dense_class: type[nn.Module]
    dense_shape: tuple[int, ...]
    compute_dtype: torch.dtype

    #: Whether ``weight`` is the transpose of the matrix of ``ternary``.
    transposes_weight = False

    @classmethod
    def adopt(cls, layer: nn.Module, ternary: TernaryModule, *, shared: bool = False) -> None:
        """Give ``layer`` this class, and ``ternary`` for its parameter ``weight``.

        With ``shared`` another layer has ``ternary`` as its submodule: state dicts hold it once.
        """
        weight = layer._parameters.pop("weight")
        assert weight is not None
        layer.dense_class = type(layer)  # type: ignore[assignment]
        layer.dense_shape = tuple(weight.shape)  # type: ignore[assignment]
        layer.compute_dtype = weight.dtype  # type: ignore[assignment]
        layer.__class__ = cls
        if shared:
            vars(layer)["ternary"] = ternary
        else:
            layer.ternary = ternary

    def restore(self, weight: nn.Parameter) -> None:
        """Give the layer the class it had before, and ``weight`` as its first parameter."""
        dense_class = self.dense_class
        for name in ("ternary", "dense_class", "dense_shape", "compute_dtype"):
            delattr(self, name)
        self.__class__ = dense_class  # type: ignore[assignment]
        others = dict(self._parameters)
        self._parameters.clear()
        self._parameters.update({"weight": weight, **others})

    @property
    def factor(self) -> Tensor | None:
        """A scalar that multiplies ``T * 2**E``, a buffer of ``ternary``; None without one."""
        return self.ternary._buffers.get("factor")

    def _scaled(self, product: Tensor) -> Tensor:
        """Return a product with ``T * 2**E``, or that itself, times :attr:`factor`."""
        return product if self.factor is None else product * self.factor

    def _float_weight(self) -> Tensor:
        return self._shaped(self._scaled(weight_of(self.ternary, self.compute_dtype)))

    #: The weight as a float tensor, made anew; backward through it casts votes.
    weight: Any = property(_float_weight)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise UsageProblem(
                f"{type(self).__name__}: its weight is ternary and cannot be replaced by a tensor",
                "Call arb_ternary.dense(model) first, or set trits: layer.ternary.set_trits(...).",
            )
        if name in _SIZES and value != getattr(self, name):
            raise UsageProblem(
                f"{type(self).__name__}: its weight is ternary and cannot be resized: {name} is "
                f"{getattr(self, name)}, and was to be {value}",
                "Resize the model before ternarize, or call arb_ternary.dense(model) first.",
            )
        super().__setattr__(name, value)

    @torch.no_grad()
    def dense_weight(self) -> Tensor:
        """Return the weight as a float tensor that casts no votes."""
        weight = self._scaled(self.ternary.dense_weight())
        return self._shaped(weight.to(self.compute_dtype))

    def _shaped(self, matrix: Tensor) -> Tensor:
        return matrix.T if self.transposes_weight else matrix.view(self.dense_shape)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.compute_dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        return self


class MultipliesRows(TernaryLayer):
    """A layer that multiplies its packed weight, without making it dense."""

    bias: Any

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x [..., K]`` (float) to ``[..., N]``."""
        activations: str = getattr(self.ternary, "activations")  # noqa: B009
        bias = None if self.bias is None else self.bias.to(torch.float32)
        if self.factor is None:
            return self.ternary.multiply(x, activations, bias)
        product = self._scaled(self.ternary.multiply(x, activations))
        return product if bias is None else product + bias.to(product.dtype)


class TernaryWeightLinear(MultipliesRows, nn.Linear):
    """``nn.Linear`` with a ternary weight."""


class TernaryWeightConv1D(MultipliesRows):
    """``Conv1D`` of transformers, a linear with a transposed weight, made ternary."""

    transposes_weight = True
    nf: int
    nx: int

    def extra_repr(self) -> str:
        """The sizes, as ``Conv1D`` shows them."""
        return f"nf={self.nf}, nx={self.nx}"


class TernaryWeightEmbedding(TernaryLayer, nn.Embedding):
    """``nn.Embedding`` with a ternary weight."""

    def forward(self, ids: Tensor) -> Tensor:
        """Look up integer ``ids [...]``: ``[..., K]``; the row ``padding_idx`` does not learn."""
        flat = ids.reshape(-1).to(torch.int64)
        rows = self._scaled(self.ternary.look_up(flat, self.compute_dtype))
        if self.padding_idx is not None:
            padding = (flat == self.padding_idx).unsqueeze(1)
            rows = torch.where(padding, rows.detach(), rows)
        return rows.view(*ids.shape, self.embedding_dim)


class TernaryWeightConv1d(TernaryLayer, nn.Conv1d):
    """``nn.Conv1d`` with a ternary weight."""


class TernaryWeightConv2d(TernaryLayer, nn.Conv2d):
    """``nn.Conv2d`` with a ternary weight."""


class TernaryWeightConv3d(TernaryLayer, nn.Conv3d):
    """``nn.Conv3d`` with a ternary weight."""


class TernaryWeightConvTranspose1d(TernaryLayer, nn.ConvTranspose1d):
    """``nn.ConvTranspose1d`` with a ternary weight."""


class TernaryWeightConvTranspose2d(TernaryLayer, nn.ConvTranspose2d):
    """``nn.ConvTranspose2d`` with a ternary weight."""


class TernaryWeightConvTranspose3d(TernaryLayer, nn.ConvTranspose3d):
    """``nn.ConvTranspose3d`` with a ternary weight."""


#: The ternary class of a layer, by the class whose ``forward`` the layer has.
TERNARY_CLASSES: Final[Mapping[type[nn.Module], type[TernaryLayer]]] = MappingProxyType(
    {
        nn.Linear: TernaryWeightLinear,
        nn.Embedding: TernaryWeightEmbedding,
        nn.Conv1d: TernaryWeightConv1d,
        nn.Conv2d: TernaryWeightConv2d,
        nn.Conv3d: TernaryWeightConv3d,
        nn.ConvTranspose1d: TernaryWeightConvTranspose1d,
        nn.ConvTranspose2d: TernaryWeightConvTranspose2d,
        nn.ConvTranspose3d: TernaryWeightConvTranspose3d,
    }
)


def ternary_class(layer: nn.Module) -> type[TernaryLayer] | None:
    """Return the ternary class of a layer; None if there is no such class.

    A subclass with a ``forward`` of its own may do anything with its weight.
    """
    kind = type(layer)
    if kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils":
        return TernaryWeightConv1D
    for base, ternary in TERNARY_CLASSES.items():
        if isinstance(layer, base) and kind.forward is base.forward:
            return ternary
    return None


def ternary_layers(model: nn.Module) -> Iterator[tuple[str, TernaryLayer]]:
    """Yield name and layer of every layer that ``ternarize`` replaced."""
    for name, module in model.named_modules():
        if isinstance(module, TernaryLayer):
            yield name, module
