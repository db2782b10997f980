"""What a ternary module holds within a step: statistics of its gradients, and how votes are
scaled.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final, Literal, NoReturn, Protocol

import torch
from torch import Tensor, nn

from arb_ternary.backends.protocol import WeightShape
from arb_ternary.backends.vote_state import VoteLimits
from arb_ternary.counters.hashing import CASTS, MICRO
from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.step_sums import StepSums

ScaleRule = Literal["residual", "frozen", "correlation"]
# : What casting votes changes of a module: the accumulators, unless votes are summed, and what lies
# beside them.
_ACCUMULATORS: Final = ("votes", "exponent_votes", "bias_votes")
_BESIDE: Final = ("correlation", "steps", "control", "stats", "magnitudes")

# : Whether modules get accumulators: four fifths of their bytes. Without them they compute, and
# refuse to learn.
ACCUMULATES: Final = ContextVar("ACCUMULATES", default=True)


class RowShard(Protocol):
    """The rows of a module's accumulators that this rank keeps, if several ranks share them."""

    @property
    def rows(self) -> slice:
        """The rows of this rank."""

    def gather(self, local: Tensor) -> Tensor:
        """Gather the rows of all ranks, ``[N, ...]``, from those of each, ``[n, ...]``.

        Collective: every rank calls it.
        """

    def apply_votes(self, op: str, *settings: int) -> Tensor:
        """Apply votes to the rows of this rank; see ``TernaryModule.apply_votes``."""


class NoAccumulators:
    """The shard of a module that computes and does not learn: no rank has its accumulators."""

    rows = slice(0, 0)

    def gather(self, *_: object) -> NoReturn:
        """Raise UsageProblem, as backward does."""
        raise UsageProblem(
            "the model was loaded without its accumulators (votes), to compute with: it cannot "
            "learn",
            "To train on: arb train CONFIG --init-from RUN. In Python: load_run(path, "
            "accumulators=True).",
        )

    apply_votes = gather


class VoteMemory(nn.Module):
    """Working memory, not state: it is in no state dict, and an optimizer can write all of it anew
    before a step.

    ``accumulates`` says whether votes can be cast. ``stats``, ``magnitudes`` (both since the last
    ``zero_grad``), ``vote_scale`` (which an optimizer writes in place) and ``vote_limits`` are the
    fields of :class:`~arb_ternary.backends.vote_state.VoteState`.
    """

    shape: WeightShape
    gradients: str
    scale_rule: ScaleRule
    weight: Tensor
    control: Tensor
    votes: Tensor
    stats: Tensor
    magnitudes: Tensor | None
    vote_scale: Tensor | None
    vote_limits: Tensor

    #: What optimizers multiply their rate by for modules of this kind.
    rate_factor: float = 1.0
    # : Whether the first backward pass of a step keeps what its votes change, so that
    # :meth:`undo_votes` can drop them. : It costs a copy of the accumulators; off, votes that are
    # cast stay.
    undoable = True
    # : What it keeps, by name; a checkpoint within a step needs it. Empty where votes are taken
    # ahead.
    kept_votes: dict[str, Tensor] | None = None
    # : Where votes are summed over the micro-batches of a step; None: they go straight into the
    # accumulators.
    sums: StepSums | None = None
    # : What an optimizer has gradients go through before votes are cast of them:
    # ``VoteState.transform``.
    transform: str | None = None
    #: Called when backward reaches a use of the module; None: nobody watches.
    on_backward: Callable[[], None] | None = None
    #: The accumulators that this rank keeps of a module; None: all of them.
    shard: RowShard | None = None

    def allocate(self, shape: WeightShape) -> None:
        """Make the working memory of sign votes for a weight of this shape, on the CPU."""
        self.shape = shape
        self.accumulates = ACCUMULATES.get()
        self.shard = None if self.accumulates else NoAccumulators()
        self.stats = torch.zeros(1 + shape.out_features + shape.in_features)
        self.magnitudes = None
        self.vote_scale = None
        self.vote_limits = torch.tensor(VoteLimits())

    def use_scaled_votes(self, *, integer: bool = False) -> None:
        """Let backward cast scaled votes by factors (float32), or by shifts (int32) if ``integer``.

        The first factors are 0 and cast no votes, the first shifts are 31 and cast next to none.
        Write others in place (``copy_``): a compiled graph is then kept. ValueError: ``integer``
        without int8 gradients and, in a linear, int8 activations.
        """
        if integer and (self.gradients, getattr(self, "activations", "int8")) != ("int8", "int8"):
            raise ValueError("integer votes need gradients 'int8' and activations 'int8'")
        size = self.shape.out_features + self.shape.in_features
        first, kind = (31, torch.int32) if integer else (0.0, torch.float32)
        self.magnitudes = torch.zeros(size, device=self.weight.device)
        self.vote_scale = torch.full((size,), first, dtype=kind, device=self.weight.device)
        self.sum_votes(self.sums is not None)

    # --- the micro-batches of a step

    def sum_votes(self, summed: bool = True) -> None:
        """Have the votes of a step summed, and clipped once when it is taken, whatever its
        micro-batches' order.

        Between steps only: sums that there are are dropped. Whoever turns it on says where a
        micro-batch begins and ends; without that, all that is cast until the step counts as one.
        """
        has_bias = getattr(self, "bias_votes", None) is not None
        scaled = self.magnitudes is not None
        self.sums = (
            StepSums(self.shape, self.weight.device, bias=has_bias, magnitudes=scaled)
            if summed
            else None
        )

    @property
    def casts(self) -> int:
        """How often the module has cast votes since the last step."""
        cast: int = self.control.tolist()[MICRO]
        if self.sums is None:
            return cast
        return self.sums.casts + cast - CASTS * self.sums.microbatch_index

    @property
    def has_cast_all(self) -> bool:
        """Whether the micro-batch under way has cast all votes that its forward passes, watched,
        will lead to.
        """
        sums = self.sums
        return sums is not None and self.casts - sums.casts >= sums.awaited > 0

    def begin_microbatch(self, index: int) -> None:
        """Begin the micro-batch with this index in its step; votes cast from now on are its."""
        if self.sums is not None:
            self.sums.microbatch_index = index
            self.sums.awaited = 0
            self.control[MICRO] = CASTS * index

    @torch.no_grad()
    def end_microbatch(self) -> None:
        """End the micro-batch: add its statistics to those of the micro-batches before it."""
        sums = self.sums
        if sums is None:
            return
        sums.casts = self.casts
        sums.microbatch_index = 0
        self.control[MICRO] = 0
        self.stats += sums.stats
        sums.stats.zero_()
        if self.magnitudes is not None and sums.magnitudes is not None:
            self.magnitudes += sums.magnitudes
            sums.magnitudes.zero_()

    @torch.no_grad()
    def settle(self, whole: Tensor, rows: slice = slice(None)) -> None:
        """Add the votes of the step to the accumulators of ``rows``, those that are kept here,
        which are clipped.

        ``whole`` are the sums of votes as they are to be added, integers ``[n, K]``.
        """
        sums = self.sums
        assert sums is not None
        scaled = self.vote_scale is not None
        sums.check(sums.casts, self.largest_vote)
        low = -self.shape.largest_vote if scaled else self.shape.smallest_vote
        self.add_votes(whole, low)
        for held, summed, least in (
            (getattr(self, "exponent_votes", None), sums.exponent_votes, -127 if scaled else -128),
            (getattr(self, "bias_votes", None), sums.bias, -128),
        ):
            if held is not None and summed is not None:
                held[rows] = (summed[rows] + held[rows]).clamp_(least, 127).to(torch.int8)

    @property
    def largest_vote(self) -> int:
        """Of one cast."""
        scale = self.vote_scale
        return 1 if scale is None else self.limits.largest_vote(shifts=scale.dtype == torch.int32)

    @property
    def limits(self) -> VoteLimits:
        """How scaled votes are clipped and rounded; set, it is checked (ValueError)."""
        return VoteLimits(*self.vote_limits.tolist())

    @limits.setter
    def limits(self, value: VoteLimits) -> None:
        self.vote_limits.copy_(torch.tensor(value.check()))

    def clear_stats(self) -> None:
        """Zero the statistics of gradients."""
        self.stats.zero_()
        if self.magnitudes is not None:
            self.magnitudes.zero_()

    def add_votes(self, whole: Tensor, low: int) -> None:
        """Add integers ``[n, K]`` to the accumulators that are kept here, clipped at ``low`` and
        the largest vote.
        """
        raise NotImplementedError

    def expect_votes(self, y: Tensor) -> None:
        """Prepare for the votes that backward from ``y``, an output of this module, will cast."""
        if self.undoable or not self.accumulates:
            self.keep_before_votes(y)
        if self.on_backward is not None and self.sums is not None:
            self.sums.awaited += 1
            watching = self.on_backward
            y.register_hook(lambda _: watching())  # type: ignore[no-untyped-call]

    def keep_before_votes(self, y: Tensor) -> None:
        """Let backward from ``y``, an output of this module, keep what its votes change, if nothing
        is kept yet.
        """
        if torch.compiler.is_compiling():
            self._keep()  # a graph has no place for a hook: a copy is kept in forward
        else:
            y.register_hook(self._keep)  # type: ignore[no-untyped-call]

    def _keep(self, _grad: object = None) -> None:
        if isinstance(self.shard, NoAccumulators):
            self.shard.gather()
        if self.undoable and self.kept_votes is None:
            changed = (*_ACCUMULATORS, *_BESIDE) if self.sums is None else _BESIDE
            found = ((name, getattr(self, name, None)) for name in changed)
            self.kept_votes = {
                name: tensor.detach().clone() for name, tensor in found if tensor is not None
            }

    def take_votes(self, *, ahead: bool = False) -> None:
        """Take the votes cast so far for good; ``ahead``: and those still to come, up to the next
        call or undoing.
        """
        self.kept_votes = {} if ahead else None

    @torch.no_grad()
    def undo_votes(self) -> None:
        """Put the module back to where it was before the first votes that are not taken yet, if it
        is ``undoable``.
        """
        kept = self.kept_votes
        self.kept_votes = None
        for name, tensor in (kept or {}).items():
            getattr(self, name).copy_(tensor)
        if self.sums is not None:
            self.sums.clear()
            # the first votes may have been those of another place than the first
            self.control[MICRO] = 0

    def gradient_square_sum(self) -> Tensor:
        """Sum of squares of the gradients since the last ``zero_grad`` (summed over micro-batches),
        float32 scalar.
        """
        return self.stats[1 : 1 + self.shape.out_features].sum()

    def working_memory(self) -> list[Tensor]:
        """Every tensor of which nothing outlives a step; with 2 bits these include the
        accumulators.
        """
        scaled = [tensor for tensor in (self.magnitudes, self.vote_scale) if tensor is not None]
        cleared = [self.votes] if self.shape.vote_bits == 2 else []
        summed = [] if self.sums is None else [*self.sums.tensors().values()]
        return [self.stats, self.vote_limits, *scaled, *cleared, *summed]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Working memory follows the buffers to their device, but not to another dtype.
        # What the host reads at every pass, control words and limits, stays on the host.
        device = self.weight.device
        self.stats = self.stats.to(device)
        if self.control.device.type not in ("cpu", "meta"):
            self.control = self.control.cpu()
        if self.magnitudes is not None and self.vote_scale is not None:
            self.magnitudes, self.vote_scale = (
                self.magnitudes.to(device),
                self.vote_scale.to(device),
            )
        if self.sums is not None and self.sums.votes.device != device:
            self.sum_votes()
        return self
