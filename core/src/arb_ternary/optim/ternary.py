"""The base of optimizers whose parameters are packed ternary weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import unwrap
from typing import Any, ClassVar, Literal, Protocol
from weakref import ref

import torch
from attrs import frozen
from torch import Tensor
from torch.optim import Optimizer

from arb_ternary.counters.hashing import MICRO, STEP
from arb_ternary.optim.protocol import StepOutcome, copied_attributes
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.module import OPTIMIZERS, TernaryModule
from arb_ternary.ternary.vote_calls import VoteCall, apply_together


def is_finite(value: Tensor | float | None) -> bool:
    """Whether a loss or signal is finite; None (no signal) is."""
    if value is None:
        return True
    finite = torch.isfinite(torch.as_tensor(value)).all()
    return bool(finite.tolist())


def to_host(scalars: Iterable[Tensor]) -> list[Any]:
    """Return the numbers in scalar tensors of one dtype, with one transfer."""
    tensors = list(scalars)
    if not tensors:
        return []
    device = tensors[0].device
    numbers: list[Any] = torch.stack([each.to(device) for each in tensors]).tolist()
    return numbers


def _count_step(controls: Sequence[Tensor]) -> None:
    """Count a step in the control words of modules, in which no cast was made yet."""
    words = torch.stack(list(controls))
    words[:, STEP] += 1
    words[:, MICRO] = 0
    torch._foreach_copy_(list(controls), list(words.unbind()))


class Exchange(Protocol):
    """Communication of a ternary optimizer at both ends of a step.

    One process and several processes implement it.
    """

    def reduce_votes(self, optimizer: TernaryOptimizer) -> None:
        """Add the votes of all micro-batches of the step to the accumulators."""

    def gather_flips(self, optimizer: TernaryOptimizer, flips: Sequence[Tensor]) -> None:
        """Apply the flips of all ranks to the weights.

        Args:
            optimizer: the optimizer of the weights.
            flips: numbers of trits that flipped on this rank (int64 scalars), which become those of
                all ranks, in place.
        """


class SingleProcessExchange:
    """The exchange of a single process, which sends nothing."""

    def reduce_votes(self, optimizer: TernaryOptimizer) -> None:
        """Add the sums of each module to its accumulators."""
        for module in optimizer.modules:
            module.end_microbatch()
            if module.sums is not None:
                module.add_step_votes(optimizer.whole_votes(module, module.sums.votes, 0))

    def gather_flips(self, optimizer: TernaryOptimizer, flips: Sequence[Tensor]) -> None:
        """No-op: the weights already have all flips."""


@frozen
class VoteUpdate:
    """How a step applies the votes of one module; a rule returns it, and the step carries it out.

    Attributes:
        kernel: the kernel that turns votes into flips.
        settings: the arguments of the kernel after the state of the module.
        bias_threshold: votes that move an element of an integer bias.
        exponent_threshold: votes that move an exponent; None leaves exponents and their votes.
        exponent_leak: amount by which the votes for exponents move towards zero.
    """

    kernel: Literal["apply_votes", "apply_scaled_votes"]
    settings: tuple[int, ...]
    bias_threshold: int
    exponent_threshold: int | None = None
    exponent_leak: int = 0


class TernaryOptimizer(Optimizer):
    """Turns votes into flips when it steps; votes are cast by the modules in backward.

    A rule implements :meth:`update_of`, which says how the votes of a module are applied. It may
    override :meth:`begin_group`, which is called once per group before that, and
    :meth:`end_update`, which sees the number of flips of each module.

    Param groups have ``kind`` "ternary", ``lr`` (a dimensionless rate, 1.0 at first, which any
    ``torch.optim.lr_scheduler`` may drive) and the rule's own entries; ``params`` are the packed
    weights. The state of a rule lives in the modules' integer buffers, so ``state_dict`` holds
    settings and counters only.

    Modules are given by qualified name. Those with different thresholds, or factors of the rate,
    are in groups of their own.
    """

    takes_loss_signal: ClassVar[bool] = True
    #: Whether the rule changes votes and weights only by the ``apply_*`` methods of the modules,
    #: one element at a time, so that each of several ranks can do so for some rows.
    votes_by_rows: ClassVar[bool] = False
    #: Whether votes are summed also in a step of one micro-batch.
    sums_votes: bool = False
    #: How votes and flips are exchanged with other processes.
    exchange: Exchange = SingleProcessExchange()
    # Unwrapped, here and below: the wrapper of torch imports torch._dynamo, which takes seconds at
    # the start of every run.
    add_param_group = unwrap(Optimizer.add_param_group)

    def __init__(self, modules: Mapping[str, TernaryModule], defaults: Mapping[str, Any]) -> None:
        if not modules:
            raise ValueError("a ternary optimizer needs at least one ternary module")
        alike: dict[tuple[float, int, int], list[TernaryModule]] = {}
        for module in modules.values():
            settings = (module.rate_factor, module.accum_threshold, module.e_accum_threshold)
            alike.setdefault(settings, []).append(module)
        self._modules = list(alike.values())
        self.updates = 0
        self.skipped_updates = 0

        given = {"kind": "ternary", "lr": 1.0, **defaults}
        groups: list[dict[str, Any]] = []
        for (factor, threshold, exponent_threshold), members in alike.items():
            group = {
                "params": [module.weight for module in members],
                "lr": given["lr"] * factor,
                "accum_threshold": threshold,
                "e_accum_threshold": exponent_threshold,
            }
            for name in ("accum_threshold", "e_accum_threshold"):
                if given.get(name) is not None:
                    group[name] = given[name]
            groups.append(group)
        super().__init__(groups, given)

        for module in modules.values():
            OPTIMIZERS[module] = ref(self)
            module.transform = None  # that of an earlier optimizer

    def modules_of(self, group_index: int) -> list[TernaryModule]:
        """The modules of one param group."""
        return self._modules[group_index]

    @property
    def modules(self) -> list[TernaryModule]:
        """All modules, group by group."""
        return [module for group in self._modules for module in group]

    def __getstate__(self) -> dict[str, Any]:
        return copied_attributes(self)

    def begin_group(self, group: dict[str, Any], modules: Sequence[TernaryModule]) -> None:
        """Prepare the update of one group, whose votes are complete and not yet applied.

        Called once per step for each group, also if its rate is 0.
        """

    @abstractmethod
    def update_of(self, group: Mapping[str, Any], module: TernaryModule) -> VoteUpdate:
        """Return how the votes of ``module`` are applied.

        Called once per step for each module that is not frozen, if the rate of its group is above
        0.
        """

    def end_update(self, flips: Mapping[TernaryModule, int]) -> Mapping[str, float]:
        """Observe the flips of each module that was updated; returns statistics of the step."""
        return {}

    def whole_votes(self, module: TernaryModule, sums: Tensor, first_row: int) -> Tensor:
        """Return the votes of a step as they are added to accumulators.

        They are the sums themselves, unless a rule overrides this.

        Args:
            module: the module that cast the votes.
            sums: int16 ``[n, K]`` over all micro-batches, of some rows of the module.
            first_row: index of the first of these rows.
        """
        return sums

    def _observe_signal(self, signal: float) -> None:
        """Observe the loss signal of a step that will be taken; rules that use it override this."""

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], Any] | None = None, *, loss_signal: Tensor | float | None = None
    ) -> StepOutcome:
        """Apply the votes cast since the last step.

        A loss (from ``closure``) or ``loss_signal`` that is not finite skips the update; see
        :meth:`skip_update`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not is_finite(loss) or not is_finite(loss_signal):
            return self.skip_update()
        if loss_signal is not None:
            self._observe_signal(float(loss_signal))
        self.exchange.reduce_votes(self)
        norm = self.gradient_norm()
        draws = max((module.casts for module in self.modules), default=1)

        updates: list[tuple[TernaryModule, VoteUpdate]] = []
        exponent_calls: list[VoteCall] = []
        for group, modules in zip(self.param_groups, self._modules, strict=True):
            # A module replaces its packed weight when it changes backend or device.
            group["params"] = [module.weight for module in modules]
            self.begin_group(group, modules)
            for module in modules:
                if module.frozen or group["lr"] <= 0:
                    continue
                update = self.update_of(group, module)
                updates.append((module, update))
                threshold = update.exponent_threshold
                if threshold is not None and module.voting_exponents() is not None:
                    settings = (threshold, group["band"], update.exponent_leak)
                    exponent_calls.append(VoteCall(module, "apply_exponent_votes", settings))

        # Exponents move first: their votes were taken on the trits before the flips.
        moved = apply_together(exponent_calls)
        for call in exponent_calls:
            if call.module not in moved:
                moved[call.module] = call.module.apply_exponent_votes(*call.settings)
        counts = apply_together([VoteCall(each, how.kernel, how.settings) for each, how in updates])
        for module, update in updates:
            if module not in counts:
                counts[module] = module.apply_votes(update.kernel, *update.settings)
            if isinstance(module, TernaryLinear):
                module.apply_bias_votes(update.bias_threshold)

        flips = [counts[module] for module, _ in updates]
        self.exchange.gather_flips(self, flips)
        _count_step([module.control for module in self.modules])
        for module in self.modules:
            module.commit_votes()
            if module.sums is not None:
                module.sums.clear()
        self.updates += 1

        changed = to_host([*flips, *moved.values()])
        flipped = dict(zip((module for module, _ in updates), changed, strict=False))
        statistics = self.end_update(flipped)

        # A step uses up its statistics: many trainers clear gradients by ``model.zero_grad()``,
        # which does not reach them.
        self._clear_stats()
        return StepOutcome(
            draws=max(draws, 1),
            grad_norm=norm,
            flips=sum(flipped.values()),
            exponent_moves=sum(changed[len(flips) :]),
            statistics=statistics,
        )

    def may_step(self, loss_signal: Tensor | float | None = None) -> bool:
        """Whether a step now would not be skipped."""
        return is_finite(loss_signal)

    def defer_step(self) -> None:
        """Observe that the votes so far are kept for a step with more micro-batches.

        A wrapper that defers steps calls it. Rules whose votes depend on the number of
        micro-batches override it.
        """

    def rescale_gradients(self, octaves: float) -> bool:
        """Observe that gradients are ``2**octaves`` times as large as before, from now on.

        Returns whether votes that were cast from such gradients already are of the wrong size. A
        rule that measures gradients overrides this; signs do not depend on their size.
        """
        return False

    def skip_update(self) -> StepOutcome:
        """Drop an update and count it.

        Gradients are cleared, and the modules are restored to the state before they cast votes.
        """
        self.skipped_updates += 1
        self.zero_grad()
        for module in self.modules:
            module.undo_votes()
        return StepOutcome(stepped=False, skipped=True)

    def gradient_norm(self) -> float:
        """Return the root of the sum of squares of the weight gradients since the last step.

        Squares are summed over micro-batches. ``zero_grad`` clears them too.
        """
        squares = (module.gradient_square_sum() for module in self.modules)
        total = sum(squares, torch.zeros(()))
        (norm,) = to_host([torch.as_tensor(total).sqrt()])
        return float(norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the statistics of gradients, as a step does; votes are state and stay.

        ``set_to_none`` applies to float gradients only.
        """
        unwrap(Optimizer.zero_grad)(self, set_to_none)
        self._clear_stats()

    def _clear_stats(self) -> None:
        """Zero the statistics of all modules, in one call: there may be dozens of small ones."""
        modules = self.modules
        sums = [module.stats for module in modules]
        sums += [module.magnitudes for module in modules if module.magnitudes is not None]
        torch._foreach_zero_(sums)

    def state_dict(self) -> dict[str, Any]:
        """Return settings and counters; the votes are in the state dict of the model."""
        return {
            **unwrap(Optimizer.state_dict)(self),
            "updates": self.updates,
            "skipped_updates": self.skipped_updates,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of :meth:`state_dict`."""
        groups = {key: state_dict[key] for key in ("state", "param_groups")}
        unwrap(Optimizer.load_state_dict)(self, groups)
        self.updates = int(state_dict["updates"])
        self.skipped_updates = int(state_dict["skipped_updates"])
