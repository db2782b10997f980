"""Modules that look up rows of a ternary table: the embedding, and RMSNorm with one row as gain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Unpack

import torch
from torch import Tensor, nn

from arb_ternary.backends.layout import spread_over_columns
from arb_ternary.backends.vote_state import VoteState
from arb_ternary.ternary.module import GroupSize, TernaryModule, VoteOptions
from arb_ternary.ternary.vote_memory import ScaleRule

#: Key of a stored eps in state dicts: that of torch's extra state.
_EPS_KEY: Final = "_extra_state"


class TernaryEmbedding(TernaryModule):
    """Lookup of rows ``W[id] = T[id] * 2**E[id]``; only the requested rows are decoded.

    In backward the gradients of duplicate ids are summed before the sign is taken. Rows that were
    not looked up stay bit-identical. Scale rules: ``residual`` (exponents learn by votes),
    ``frozen``, and ``correlation``: the exponents stay, and the scale of a group is ``2**(E + kappa
    * mean)`` with ``mean = -correlation / (steps * G)``, where ``correlation`` sums the scores
    ``sum(s * T)`` of the group over ``steps`` updates.

    Args:
        num_embeddings: ``N``.
        embedding_dim: ``K``.
        group_size: columns that share an exponent: 32, 64, 128, 256 or "row".
        kappa: strength of the correlation rule.
        exponent_offset: added to the initial exponent, which is that of a fan-in of 1.
        dtype: dtype of the output.
        device: the device of the buffers.
        options: see :class:`~arb_ternary.ternary.module.VoteOptions`.
    """

    scale_rules: tuple[ScaleRule, ...] = ("residual", "frozen", "correlation")

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group_size: GroupSize = "row",
        kappa: float = 4.0,
        exponent_offset: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        **options: Unpack[VoteOptions],
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            group_size=group_size,
            fan_in=1,
            exponent_offset=exponent_offset,
            **options,
        )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.kappa = kappa
        self.dtype = dtype
        self.correlation: Tensor | None
        self.steps: Tensor | None
        self.register_buffer("correlation", None)
        self.register_buffer("steps", None)
        if self.scale_rule == "correlation":
            size = (num_embeddings, self.shape.groups)
            self.correlation = torch.zeros(size, dtype=torch.int16)
            self.steps = torch.zeros(size, dtype=torch.int32)
        if device is not None:
            self.to(device)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up integer ``ids [...]``: ``[..., K]`` in ``dtype``.

        Raises:
            IndexError: an id is outside ``0 .. N - 1``. On a GPU this is a device-side assertion,
                as for torch's embedding.
        """
        flat = ids.reshape(-1).to(torch.int64)
        rows = self.look_up(flat, self.dtype)
        if self.correlation is not None and self.steps is not None:
            steps = self.steps.index_select(0, flat).clamp_min(1).to(torch.float32)
            correlation = self.correlation.index_select(0, flat).to(torch.float32)
            mean = -correlation / (steps * self.shape.group_size)
            scale = spread_over_columns(torch.exp2(self.kappa * mean), self.shape)
            rows = rows * scale.to(self.dtype)
        return rows.view(*ids.shape, self.embedding_dim)

    def vote_state(self) -> VoteState:
        """Return the state with ``correlation`` and ``steps``; see the base class."""
        return super().vote_state()._replace(correlation=self.correlation, steps=self.steps)


class StoredEps(nn.Module):
    """A norm whose state dicts hold ``eps`` if ``stored_eps`` is set.

    It is stored as a float64 scalar, whatever dtype the model is cast to. If a scale in front of a
    norm is folded into the norm, eps takes over the scale: ``norm(s x, eps) = norm(x, eps / s^2)``.
    """

    eps: Any
    stored_eps: bool = False

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.stored_eps:
            destination[prefix + _EPS_KEY] = torch.tensor(self.eps, dtype=torch.float64)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        metadata: Any,
        strict: bool,
        missing_keys: list[str],
        *others: Any,
    ) -> None:
        key = prefix + _EPS_KEY
        rest = dict(state_dict)
        if self.stored_eps and key in rest:
            self.eps = float(rest.pop(key))
        elif self.stored_eps and strict:
            missing_keys.append(key)
        super()._load_from_state_dict(rest, prefix, metadata, strict, missing_keys, *others)


class TernaryRMSNorm(StoredEps, TernaryModule):
    """``y = x * rsqrt(mean(x**2) + eps) * gain`` with a gain ``T * 2**E`` that learns by votes.

    The gain is a ternary weight of one row, which is 1 at first. Its state, votes, flips and
    arguments are those of every ternary module. With ``learned=False`` the gain stays 1, is not
    read and casts no votes. With ``stored_eps`` state dicts hold ``eps``.
    """

    def __init__(
        self,
        features: int,
        *,
        eps: float = 1e-6,
        learned: bool = True,
        stored_eps: bool = False,
        group_size: GroupSize = 32,
        device: torch.device | str | None = None,
        **options: Unpack[VoteOptions],
    ) -> None:
        super().__init__(1, features, group_size=group_size, fan_in=1, **options)
        self.features = features
        self.eps = eps
        self.stored_eps = stored_eps
        self.learned = learned
        self.frozen = not learned
        ones = torch.ones(1, features, dtype=torch.int8)
        self.set_trits(ones, exponent=torch.zeros_like(self.exponent))
        self.register_buffer("_row", torch.zeros(1, dtype=torch.int64), persistent=False)
        self._row: Tensor
        if device is not None:
            self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x [..., K]`` (float); the result has its shape and dtype."""
        wide = x.to(torch.float32)
        y = torch.nn.functional.rms_norm(wide, (self.features,), eps=self.eps)
        if self.learned:
            gain = self.look_up(self._row, torch.float32)
            y = y * gain.view(self.features)
        return y.to(x.dtype)
