"""Decode tokens of many sequences together by the backend's kernel ``text.decode_rows``.

A call takes any number of tokens of any sequences: one of each that is being continued, and some of
those whose prompts are being read. Keys and values lie in blocks of positions, which sequences with
the same beginning can share. What a token gives is the same to the last bit, whatever else is in
the call. The kernel serves the decoders that ``text.decode_step`` serves
(:mod:`~arb_ternary_text.models.native_decode`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from arb_ternary.backends.select import get_backend
from arb_ternary.errors import UsageProblem
from arb_ternary_text.models.block_kernels import may_round_differently
from arb_ternary_text.models.cache import CacheNumbers
from arb_ternary_text.models.decode_plan import DecoderPlan
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.native_decode import DECODE_ROWS, NotPlainError, plan_of


class RowDecoder:
    """Runs tokens of many sequences through a decoder, which must not change meanwhile.

    Use :func:`row_decoder` to make one.
    """

    def __init__(
        self, model: Decoder, plan: DecoderPlan, rows: Callable[..., Tensor | None]
    ) -> None:
        self._model = model
        self._plan = plan
        self._rows = rows

    def bytes_per_position(self, numbers: CacheNumbers) -> int:
        """Return the bytes that keys and values of one position take in all layers."""
        return sum(stored.nbytes for stored in self.new_blocks(1, 1, numbers))

    def new_blocks(self, count: int, size: int, numbers: CacheNumbers) -> list[Tensor]:
        """Make ``count`` blocks of ``size`` positions: keys and values of each layer in turn.

        Their values are undefined until they are written.
        """
        plan = self._plan
        made: list[Tensor] = []
        for _ in plan.layers:
            rows = (count, plan.key_heads, size)
            dtype = _stored_dtype(numbers, plan.dtype)
            made += (torch.empty(*rows, plan.features, dtype=dtype) for _ in range(2))
            if numbers == "int8":
                made += (torch.empty(rows, dtype=torch.float32) for _ in range(2))
        return made

    @torch.no_grad()
    def decode(
        self,
        ids_R: Tensor,
        blocks: list[Tensor],
        tables_ST: Tensor,
        sequence_R: Tensor,
        position_R: Tensor,
        wanted_W: Tensor,
    ) -> Tensor:
        """Return logits ``[W, V]`` after some of the tokens; store keys and values of all.

        Args:
            ids_R: the tokens, int64.
            blocks: from :meth:`new_blocks`.
            tables_ST: the blocks of each sequence, int64: position ``t`` is place ``t % size`` of
                block ``tables_ST[s, t // size]``.
            sequence_R: the sequence of each token, a row of ``tables_ST``, int64.
            position_R: its position, int64. Earlier positions have been stored, or are among the
                tokens.
            wanted_W: the tokens after which logits are wanted, int64.

        Raises:
            UsageProblem: the kernel refuses: an id or a block does not exist, or exponents of a
                weight spread too far.
        """
        window = self._model.config.sliding_window
        past_R = position_R if window is None else position_R.clamp(max=window - 1)
        out = self._rows(
            ids_R,
            blocks,
            tables_ST,
            sequence_R,
            position_R,
            past_R,
            position_R.to(torch.float64) / self._model.config.rotary_scaling,
            wanted_W,
        )
        if out is None:
            raise UsageProblem(
                f"{DECODE_ROWS}: the kernel refuses these tokens, or the model has changed"
            )
        if self._plan.head is not None:
            return out
        # One row at a time: a product of floats may round otherwise among other rows.
        logits = out.new_empty((out.size(0), self._model.vocabulary_size))
        for row in range(out.size(0)):
            logits[row] = self._model.head(out[row : row + 1])[0]
        return logits if self._plan.logit_scale == 1.0 else logits * self._plan.logit_scale


def _stored_dtype(numbers: CacheNumbers, computed: torch.dtype) -> torch.dtype:
    """Return the dtype of stored keys and values, of a model that computes in ``computed``."""
    match numbers:
        case "float":
            return computed
        case "bfloat16":
            return torch.bfloat16
        case "int8":
            return torch.int8


@torch.no_grad()
def row_decoder(model: Any) -> RowDecoder | None:
    """Return a decoder of rows for ``model``; None if its modules have to run.

    The model is tried with one token, because exponents of its weights may spread too far for the
    kernel.
    """
    if type(model) is not Decoder or not model.config.causal or model.training:
        return None
    if not may_round_differently() or torch.is_autocast_enabled("cpu"):
        return None
    try:
        plan, backend = plan_of(model)
    except NotPlainError:
        return None
    kernel: Any = get_backend(backend).kernels.get(DECODE_ROWS)
    rows = None if kernel is None else kernel(plan)
    if rows is None:
        return None
    made = RowDecoder(model, plan, rows)
    zero = torch.zeros(1, dtype=torch.int64)
    try:
        made.decode(zero, made.new_blocks(1, 1, "float"), zero[None], zero, zero, zero)
    except UsageProblem:
        return None
    return made
