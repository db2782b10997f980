"""The working memory of a ternary module within a step.

It holds statistics of gradients, sums of votes, and a copy of what the votes of the step change.
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
#: Attributes that casting votes changes: accumulators (unless votes are summed), and the others.
_ACCUMULATORS: Final = ("votes", "exponent_votes", "bias_votes")
_OTHERS: Final = ("correlation", "steps", "control", "stats", "magnitudes")

#: Whether new modules get accumulators, which are four fifths of their bytes. Without them a module
#: computes, and refuses to learn.
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
    """Working memory, which is in no state dict; an optimizer can rewrite all of it before a step.

    Attributes:
        accumulates: whether votes can be cast.
        stats: see :class:`~arb_ternary.backends.vote_state.VoteState`, as are the next three;
            sums since the last step or ``zero_grad``.
        magnitudes: sums since the last step or ``zero_grad``.
        vote_scale: an optimizer writes it in place.
        vote_limits: see :attr:`limits`.
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

    #: Factor by which optimizers multiply their rate for modules of this kind.
    rate_factor: float = 1.0
    #: Whether the first backward pass of a step copies what its votes change, so that
    #: :meth:`undo_votes` can drop them. It costs a copy of the accumulators. If it is off, votes
    #: that are cast stay.
    undoable = True
    #: That copy, by name; a checkpoint within a step needs it. Empty if votes are committed ahead.
    kept_votes: dict[str, Tensor] | None = None
    #: Sums of the votes of a step over its micro-batches; None: votes are added to the accumulators
    #: as they are cast.
    sums: StepSums | None = None
    #: A rule through which gradients go before votes are cast: ``VoteState.transform``.
    transform: str | None = None
    #: Called when backward reaches a use of the module; None calls nothing.
    on_backward: Callable[[], None] | None = None
    #: The accumulators that this rank keeps of a module; None: all of them.
    shard: RowShard | None = None

    def allocate(self, shape: WeightShape) -> None:
        """Create the working memory of sign votes for a weight of this shape, on the CPU."""
        self.shape = shape
        self.accumulates = ACCUMULATES.get()
        self.shard = None if self.accumulates else NoAccumulators()
        self.stats = torch.zeros(1 + shape.out_features + shape.in_features)
        self.magnitudes = None
        self.vote_scale = None
        self.vote_limits = torch.tensor(VoteLimits())

    def use_scaled_votes(self, *, integer: bool = False) -> None:
        """Let backward cast scaled votes by factors (float32), or by shifts (int32) if ``integer``.

        The first factors are 0 and cast no votes; the first shifts are 31 and cast almost none.
        Write others in place (``copy_``), which keeps a compiled graph valid.

        Raises:
            ValueError: ``integer`` without int8 gradients and, in a linear, int8 activations.
        """
        if integer and (self.gradients, getattr(self, "activations", "int8")) != ("int8", "int8"):
            raise ValueError("integer votes need gradients 'int8' and activations 'int8'")
        size = self.shape.out_features + self.shape.in_features
        device = self.weight.device
        self.magnitudes = torch.zeros(size, device=device)
        if integer:
            self.vote_scale = torch.full((size,), 31, dtype=torch.int32, device=device)
        else:
            self.vote_scale = torch.zeros(size, device=device)
        self.sum_votes(self.sums is not None)

    @property
    def limits(self) -> VoteLimits:
        """How scaled votes are clipped and rounded; ValueError if a limit is set out of range."""
        return VoteLimits(*self.vote_limits.tolist())

    @limits.setter
    def limits(self, value: VoteLimits) -> None:
        self.vote_limits.copy_(torch.tensor(value.check()))

    @property
    def largest_vote(self) -> int:
        """The largest vote of one cast."""
        scale = self.vote_scale
        return 1 if scale is None else self.limits.largest_vote(shifts=scale.dtype == torch.int32)

    # --- statistics

    def gradient_square_sum(self) -> Tensor:
        """Sum of squares of the gradients since the last step or ``zero_grad``, a float32 scalar.

        It is summed over micro-batches.
        """
        return self.stats[1 : 1 + self.shape.out_features].sum()

    def clear_stats(self) -> None:
        """Zero the statistics of gradients."""
        self.stats.zero_()
        if self.magnitudes is not None:
            self.magnitudes.zero_()

    # --- the micro-batches of a step

    def sum_votes(self, summed: bool = True) -> None:
        """Sum the votes of a step, and clip once, when the step is taken.

        The result does not depend on the order of the micro-batches. Call this between steps only:
        existing sums are dropped. The caller marks where a micro-batch begins and ends; without
        marks, all casts of a step count as one micro-batch.
        """
        self.sums = None
        if summed:
            bias = getattr(self, "bias_votes", None) is not None
            scaled = self.magnitudes is not None
            self.sums = StepSums(self.shape, self.weight.device, bias=bias, magnitudes=scaled)

    @property
    def casts(self) -> int:
        """Number of casts since the last step."""
        cast: int = self.control.tolist()[MICRO]
        if self.sums is None:
            return cast
        return self.sums.casts + cast - CASTS * self.sums.microbatch_index

    @property
    def has_cast_all(self) -> bool:
        """Whether the current micro-batch has cast all votes of its forward passes."""
        sums = self.sums
        return sums is not None and self.casts - sums.casts >= sums.awaited > 0

    def begin_microbatch(self, index: int) -> None:
        """Begin the micro-batch with this index in its step; later casts belong to it."""
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
    def add_step_votes(self, votes: Tensor, rows: slice = slice(None)) -> None:
        """Add the votes of a step to the accumulators, which are clipped.

        Args:
            votes: integers ``[n, K]``, the sums of votes for trits, as they will be added.
            rows: the rows that this rank keeps.
        """
        sums = self.sums
        assert sums is not None
        scaled = self.vote_scale is not None
        sums.check(sums.casts, self.largest_vote)
        self.add_votes(votes, -self.shape.largest_vote if scaled else self.shape.smallest_vote)
        exponent_votes = getattr(self, "exponent_votes", None)
        if exponent_votes is not None:
            low = -127 if scaled else -128
            _add_clipped_(exponent_votes, sums.exponent_votes, rows, low)
        bias_votes = getattr(self, "bias_votes", None)
        if bias_votes is not None and sums.bias is not None:
            _add_clipped_(bias_votes, sums.bias, rows, -128)

    def add_votes(self, votes: Tensor, low: int) -> None:
        """Add integers ``[n, K]`` to the accumulators that this rank keeps.

        They are clipped at ``low`` and the largest vote.
        """
        raise NotImplementedError

    # --- undoing the votes of a step

    def expect_votes(self, y: Tensor) -> None:
        """Prepare for the votes that backward from ``y``, an output of this module, will cast."""
        if self.undoable or not self.accumulates:
            self.keep_before_votes(y)
        if self.on_backward is not None and self.sums is not None:
            # Checkpointing computes a forward pass again within backward, which casts no votes.
            if torch._C._current_graph_task_id() == -1:
                self.sums.awaited += 1
            on_backward = self.on_backward
            y.register_hook(lambda _: on_backward())  # type: ignore[no-untyped-call]

    def keep_before_votes(self, y: Tensor) -> None:
        """Let backward from ``y`` copy what its votes change, unless there is a copy already."""
        if torch.compiler.is_compiling():
            self._keep()  # a graph cannot hold a hook: copy in forward
        else:
            y.register_hook(self._keep)  # type: ignore[no-untyped-call]

    def _keep(self, _grad: object = None) -> None:
        if isinstance(self.shard, NoAccumulators):
            self.shard.gather()
        if not self.undoable or self.kept_votes is not None:
            return
        changed = (*_ACCUMULATORS, *_OTHERS) if self.sums is None else _OTHERS
        self.kept_votes = {}
        for name in changed:
            tensor = getattr(self, name, None)
            if tensor is not None:
                self.kept_votes[name] = tensor.detach().clone()

    def commit_votes(self, *, ahead: bool = False) -> None:
        """Make the votes cast so far permanent.

        With ``ahead``, also those that follow, up to the next call of this or :meth:`undo_votes`.
        """
        # For every module in every step: the way through ``nn.Module.__setattr__`` takes longer.
        self.__dict__["kept_votes"] = {} if ahead else None

    @torch.no_grad()
    def undo_votes(self) -> None:
        """Restore the state before the first votes that are not committed, if ``undoable``."""
        kept = self.kept_votes or {}
        self.kept_votes = None
        for name, tensor in kept.items():
            getattr(self, name).copy_(tensor)
        if self.sums is not None:
            self.sums.clear()
            # The first votes may have been those of another micro-batch than the first.
            self.control[MICRO] = 0

    # --- memory

    def working_memory(self) -> list[Tensor]:
        """Every tensor that does not outlive a step; with 2 bits these include the accumulators."""
        tensors = [self.stats, self.vote_limits]
        if self.magnitudes is not None:
            tensors.append(self.magnitudes)
        if self.vote_scale is not None:
            tensors.append(self.vote_scale)
        if self.shape.vote_bits == 2:
            tensors.append(self.votes)
        if self.sums is not None:
            tensors.extend(self.sums.tensors().values())
        return tensors

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Working memory follows the buffers to their device, but not to another dtype. Control
        # words and limits stay on the host, which reads them in every pass.
        device = self.weight.device
        self.stats = self.stats.to(device)
        if self.control.device.type not in ("cpu", "meta"):
            self.control = self.control.cpu()
        if self.magnitudes is not None and self.vote_scale is not None:
            self.magnitudes = self.magnitudes.to(device)
            self.vote_scale = self.vote_scale.to(device)
        if self.sums is not None and self.sums.votes.device != device:
            self.sum_votes()
        return self


def _add_clipped_(accumulator: Tensor, sums: Tensor, rows: slice, low: int) -> None:
    """Add sums to int8 accumulators of some rows, clipped at ``low`` and 127."""
    total = sums[rows] + accumulator[rows]
    accumulator[rows] = total.clamp_(low, 127).to(torch.int8)
