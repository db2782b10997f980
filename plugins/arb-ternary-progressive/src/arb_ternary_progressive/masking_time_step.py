"""Masking by time: the later the time step, the more of each sample is hidden.

Shapes: ``B`` samples, ``S`` positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arb_ternary.counters.hashing import counter_hash_rows, stream_id, uniform_
from arb_ternary.protocols.data import Batch, MaskContext
from arb_ternary_progressive.masking import GrowthContext, HidingStrategy, RowMasks, growth_of
from arb_ternary_progressive.masking_config import (
    Interpretation,
    ReplacementOptions,
    Sampling,
    TimeStepConfig,
)
from arb_ternary_progressive.masks import time_key
from arb_ternary_progressive.samples import as_samples
from arb_ternary_progressive.time import (
    CustomMapping,
    TimeMapping,
    depth_of,
    exponential,
    step_fractions,
    step_of_time,
    time_of_step,
    time_step_for_stack,
)

if TYPE_CHECKING:
    from arb_ternary_progressive.config import ProgressiveConfig, StackWiseConfig
    from arb_ternary_progressive.growth_config import GrowthConfig

_TIME = stream_id("arb_ternary_progressive.time")


class TimeStepMasking(HidingStrategy):
    """Hides a share of each row that belongs to its time step.

    A time that the phase gives (``GrowthContext.time``) decides. Where there is none, time is drawn
    (``input``): in training from the generator, one for the batch or one for each sample; in
    evaluation by the sample's id, so that the loss does not depend on how samples are batched. Or
    it follows from ``GrowthContext.depth`` (``depth``).

    Args:
        config: the options of the strategy, or the config of progressive training.
        final_depth: stacks of the finished rack; None = ``max_stacks`` of a config of progressive
            training. The methods that take a ``stack_idx`` need it.
        seed: of the masks that :meth:`generate_masks_for_stack` makes; None = that of the config, 0
            where it has none.

    Attributes:
        final_depth: as given.
        max_stacks: of a config of progressive training, which is what a custom mapping is given;
            else None.
        fractions: the share of hidden positions at each step.
        seed: as given.
        training_objective: the objective of a config of progressive training, else None.
        vocabulary_size: number of token ids where the config knows it, else None.
    """

    def __init__(
        self,
        config: TimeStepConfig | ProgressiveConfig | StackWiseConfig | None = None,
        *,
        final_depth: int | None = None,
        seed: int | None = None,
    ) -> None:
        given: Any = TimeStepConfig() if config is None else config
        progressive = given.training.progressive if hasattr(given, "training") else given
        self.vocabulary_size: int | None = (
            given.model.vocab_size if hasattr(given, "model") else None
        )
        self.training_objective: str | None = getattr(progressive, "training_objective", None)
        self.max_stacks: int | None = getattr(progressive, "max_stacks", None)
        self.final_depth: int | None = self.max_stacks if final_depth is None else final_depth
        self.seed = int(getattr(progressive, "seed", 0) if seed is None else seed)
        self.num_time_steps: int = progressive.num_time_steps
        self.time_interpretation: Interpretation = progressive.time_interpretation
        self.time_sampling: Sampling = progressive.time_sampling
        self.stack_time_mapping: TimeMapping = progressive.stack_time_mapping
        self.time_per_stack: int = getattr(progressive, "time_per_stack", 1)
        self.custom_time_mapping: CustomMapping | str | None = getattr(
            progressive, "custom_time_mapping", None
        )
        is_own = isinstance(progressive, TimeStepConfig)
        self.fractions = step_fractions(
            progressive.fractions if is_own else progressive.time_step_fractions,
            self.num_time_steps,
        )
        super().__init__(
            progressive if is_own else ReplacementOptions(mask_token_id=progressive.mask_token_id)
        )

    # --- stacks

    def get_time_step_for_stack(self, stack_idx: int, *, final_depth: int | None = None) -> int:
        """The time step of a stack.

        Args:
            stack_idx: counted in the order of building.
            final_depth: stacks of the finished rack, where it is not the strategy's.

        Raises:
            UsageProblem: there is no such stack.
            ConfigError: a custom mapping cannot be used.
        """
        return time_step_for_stack(
            stack_idx,
            final_depth=self._stacks(stack_idx) if final_depth is None else final_depth,
            num_time_steps=self.num_time_steps,
            mapping=self.stack_time_mapping,
            custom=self.custom_time_mapping,
            time_per_stack=self.time_per_stack,
            max_stacks=self.max_stacks,
        )

    def time_for_stack(self, stack_idx: int, *, final_depth: int | None = None) -> float:
        """The middle of the time step of a stack; see :meth:`get_time_step_for_stack`."""
        return time_of_step(
            self.get_time_step_for_stack(stack_idx, final_depth=final_depth), self.num_time_steps
        )

    def generate_masks_for_stack(
        self,
        batch: Batch | Mapping[str, Any] | Tensor,
        stack_idx: int,
        *,
        time: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Bool ``[B, S]``: the positions of ``batch`` that are hidden when stack ``stack_idx`` is
        trained.

        Args:
            batch: token ids ``[B, S]``, a mapping with ``input_ids`` (and ``sample_ids``), or a
                batch of the core.
            stack_idx: counted in the order of building.
            time: a time that decides instead, in [0, 1].
            generator: draws the time where time is an input; None = one seeded with the strategy's
                seed.
        """
        samples = as_samples(batch)
        if generator is None:
            generator = torch.Generator().manual_seed(self.seed)
        if time is None and self.time_interpretation == "depth":
            time = self.time_for_stack(stack_idx)
        depth = depth_of(stack_idx, self._stacks(stack_idx))
        context = GrowthContext(0, self.seed, self.vocabulary_size or 0, depth=depth, time=time)
        return self.choose(samples.batch(), generator, context)[0]

    # --- masks

    def rows(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> RowMasks:
        """See :class:`HidingStrategy`; each time is the middle of a time step."""
        steps = self._steps(batch, generator, context)
        times = tuple(time_of_step(step, self.num_time_steps) for step in steps)
        return RowMasks(
            tuple(self.fractions[step] for step in steps), tuple(map(time_key, times)), times
        )

    def _steps(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> list[int]:
        count = len(batch.sample_ids)
        growth = growth_of(context)
        if growth.time is not None:
            return [step_of_time(growth.time, self.num_time_steps)] * count
        if self.time_interpretation == "depth":
            return [self._step_at(growth.depth)] * count
        if context.training and self.time_sampling == "batch":
            drawn = float(torch.rand((), generator=generator))
            return [step_of_time(drawn, self.num_time_steps)] * count
        # One number of the generator for the batch, hashed with each id: rows may stand in any
        # order.
        salt = int(torch.randint(1 << 62, (), generator=generator)) if context.training else 0
        drawn_B = uniform_(
            counter_hash_rows(batch.sample_ids.cpu(), 1, context.seed, salt, _TIME)
        ).flatten()
        return [step_of_time(time, self.num_time_steps) for time in drawn_B.tolist()]

    def _step_at(self, depth: float) -> int:
        progress = exponential(depth) if self.stack_time_mapping == "exponential" else depth
        return min(math.floor(progress * (self.num_time_steps - 1) + 1e-9), self.num_time_steps - 1)

    def _stacks(self, stack_idx: int) -> int:
        return stack_idx + 1 if self.final_depth is None else self.final_depth


def depth_time(config: GrowthConfig, stack_idx: int, final_depth: int) -> tuple[int, float]:
    """Time step and time of stack ``stack_idx`` (in the order of building) of a rack that will have
    ``final_depth``.

    Raises:
        UsageProblem: there is no such stack.
        ConfigError: a custom mapping cannot be used.
    """
    step = time_step_for_stack(
        stack_idx,
        final_depth=final_depth,
        num_time_steps=config.num_time_steps,
        mapping=config.stack_time_mapping,
        custom=config.custom_time_mapping,
        time_per_stack=config.time_per_stack,
        max_stacks=config.max_stacks,
    )
    return step, time_of_step(step, config.num_time_steps)


def build(config: TimeStepConfig) -> TimeStepMasking:
    """The factory that the ``time_step`` strategy registers."""
    return TimeStepMasking(config)
