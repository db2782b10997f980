"""The masking strategies that hide tokens: ``mlm``, ``progressive`` and ``time_step``.

Shapes: ``B`` samples, ``S`` positions.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.counters.hashing import counter_hash_rows, stream_id, uniform_
from arb_ternary.errors import ConfigError, DataError
from arb_ternary.protocols.data import Batch, MaskContext, MaskedBatch
from arb_ternary_progressive.config import GrowthConfig
from arb_ternary_progressive.masking_config import (
    MlmConfig,
    ProgressiveMaskingConfig,
    ReplacementOptions,
    Schedule,
    TimeStepConfig,
)
from arb_ternary_progressive.masks import corrupt, hidden_positions, time_key
from arb_ternary_progressive.samples import as_batch
from arb_ternary_progressive.stackwise import ProgressiveConfig, StackWiseConfig
from arb_ternary_progressive.time import (
    Fractions,
    depth_of,
    exponential,
    step_fractions,
    step_of_time,
    time_of_step,
)

#: Stream of the counter hash for the times of samples.
_TIME: Final = stream_id("arb_ternary_progressive.time")

_SCHEDULES: Final[dict[Schedule, Callable[[float], float]]] = {
    "linear": lambda progress: progress,
    "exponential": exponential,
    "cosine": lambda progress: (1.0 - math.cos(math.pi * progress)) / 2.0,
}


@frozen
class GrowthContext(MaskContext):
    """The place in a model's growth at which a batch is masked.

    Attributes:
        depth: 0 with the first stack, 1 with the last; 1 for a model that does not grow.
        time: diffusion time in [0, 1]; None if the phase sets none.
    """

    depth: float = 1.0
    time: float | None = None

    @classmethod
    def of(cls, context: MaskContext) -> GrowthContext:
        """Return ``context`` itself, or the context of a model that does not grow."""
        if isinstance(context, GrowthContext):
            return context
        return cls(context.step, context.seed, context.vocabulary_size, context.training)


def growth_context(
    growth: GrowthConfig,
    stack: int,
    stacks: int,
    seed: int,
    *,
    step: int = 0,
    vocabulary_size: int = 0,
    drawn: float | None = None,
) -> GrowthContext:
    """Return the context in which batches of a stack are masked.

    Args:
        growth: how stacks get their times.
        stack: index of the stack in the order of building.
        stacks: stacks of the finished rack.
        seed: seed of the masks.
        step: step of the training.
        vocabulary_size: number of token ids.
        drawn: time of the batch if time is an input; None = the masking draws it.

    Raises:
        UsageProblem: there is no such stack.
    """
    depth = depth_of(stack, stacks)
    time = drawn
    if growth.time_interpretation == "depth":
        time = time_of_step(growth.time_step(stack, stacks), growth.num_time_steps)
    return GrowthContext(
        step=step, seed=seed, vocabulary_size=vocabulary_size, depth=depth, time=time
    )


@frozen
class RowMasks:
    """Inputs of the masks of a batch, besides the seed and the sample ids.

    Attributes:
        shares: share of hidden positions, one per row.
        keys: hash keys of the times, one per row.
        times: the times, one per row; None for a strategy without time.
    """

    shares: tuple[float, ...]
    keys: tuple[int, ...]
    times: tuple[float, ...] | None = None


class HidingStrategy(ABC):
    """Hides tokens of each sample; the targets are the tokens themselves.

    Exactly ``floor(S share)`` positions per row are hidden and count in the loss. Masks do not
    depend on the step: a sample that comes again at the same time is hidden in the same way, so
    that a cache of its hidden states stays valid.
    """

    def __init__(self, replacement: ReplacementOptions) -> None:
        self.replacement = replacement

    @abstractmethod
    def rows(self, batch: Batch, generator: torch.Generator, context: GrowthContext) -> RowMasks:
        """Return the share of each row that is hidden, and its hash key."""

    def mask_token(self, vocabulary_size: int) -> int:
        """Return the id of the mask token.

        Raises:
            ConfigError: it is outside the vocabulary.
        """
        token = self.replacement.mask_token_id
        if token is None:
            return vocabulary_size - 1
        if token >= vocabulary_size:
            raise ConfigError(
                f"mask_token_id: {token} is outside the vocabulary of {vocabulary_size} ids",
                f"Use an id below {vocabulary_size} that the data does not use, or null for the "
                "last one.",
            )
        return token

    def reserved_ids(self, vocabulary_size: int) -> tuple[int, ...]:
        """Return the ids that the data must not use."""
        return (self.mask_token(vocabulary_size),)

    def choose(
        self, batch: Batch, generator: torch.Generator, context: MaskContext
    ) -> tuple[Tensor, Tensor | None]:
        """Return the positions that :meth:`apply` hides, without hiding them.

        If times are drawn, an equally seeded generator gives the same ones.

        Returns:
            The positions, bool ``[B, S]``, and the times, float32 ``[B]`` or None.
        """
        rows = self.rows(batch, generator, GrowthContext.of(context))
        return _hidden(batch, rows, context.seed)

    def apply(self, batch: Batch, generator: torch.Generator, context: MaskContext) -> MaskedBatch:
        """Return the corrupted inputs, the original tokens, the hidden positions and the times.

        Raises:
            DataError: the mask token occurs in the data.
            ConfigError: it is outside the vocabulary.
        """
        tokens_BS = batch.data[:, :-1].clone(memory_format=torch.contiguous_format)
        mask_token = self.mask_token(context.vocabulary_size)
        self._check_mask_token_unused(tokens_BS, batch.sample_ids, mask_token)
        rows = self.rows(batch, generator, GrowthContext.of(context))
        hidden_BS, times_B = _hidden(batch, rows, context.seed)
        inputs_BS = corrupt(
            tokens_BS,
            hidden_BS,
            batch.sample_ids.to(tokens_BS.device),
            rows.keys,
            context.seed,
            vocabulary_size=context.vocabulary_size,
            mask_token=mask_token,
            mask_share=self.replacement.mask_share,
            random_share=self.replacement.random_share,
        )
        return MaskedBatch(inputs_BS, tokens_BS, hidden_BS, times_B)

    @staticmethod
    def _check_mask_token_unused(tokens_BS: Tensor, sample_ids_B: Tensor, mask_token: int) -> None:
        found = (tokens_BS == mask_token).nonzero()
        if len(found):
            row, position = found[0].tolist()
            raise DataError(
                f"sample {int(sample_ids_B[row])}: token id {mask_token} at position {position} is "
                "the mask token, and the data uses it",
                "Add an id to the data with data: {name: with_mask_token, source: ...}, or set "
                "mask_token_id to an id that the data does not use.",
            )


def _hidden(batch: Batch, rows: RowMasks, seed: int) -> tuple[Tensor, Tensor | None]:
    """Return the hidden positions of a batch, bool ``[B, S]``, and its times, float32 ``[B]``."""
    device = batch.data.device
    positions = batch.data.shape[1] - 1
    sample_ids_B = batch.sample_ids.to(device)
    hidden_BS = hidden_positions(sample_ids_B, positions, rows.shares, rows.keys, seed)
    times_B = None if rows.times is None else torch.tensor(rows.times, device=device)
    return hidden_BS, times_B


class MlmMasking(HidingStrategy):
    """Masked language modelling (Devlin et al., BERT, 2019): hides a fixed share of each row.

    By default 80 % of the hidden tokens become the mask token, 10 % a random one, and 10 % stay.
    """

    def __init__(self, config: MlmConfig | None = None) -> None:
        self.config = MlmConfig() if config is None else config
        super().__init__(self.config)

    def rows(self, batch: Batch, generator: torch.Generator, context: GrowthContext) -> RowMasks:
        """See :class:`HidingStrategy`."""
        count = len(batch.sample_ids)
        return RowMasks((self.config.fraction,) * count, (time_key(context.time),) * count)


def progressive_fraction(
    depth: float, schedule: Schedule = "linear", start: float = 0.15, end: float = 0.90
) -> float:
    """Return ``start + (end - start) f(depth)`` for ``depth`` in [0, 1].

    ``f(p)`` is ``p`` (linear), ``(e**p - 1) / (e - 1)`` (exponential) or ``(1 - cos(pi p)) / 2``
    (cosine).
    """
    return start + (end - start) * _SCHEDULES[schedule](depth)


class ProgressiveMasking(HidingStrategy):
    """Hides a share of each row that depends on the depth, ``GrowthContext.depth``."""

    def __init__(self, config: ProgressiveMaskingConfig | None = None) -> None:
        self.config = ProgressiveMaskingConfig() if config is None else config
        super().__init__(self.config)

    def rows(self, batch: Batch, generator: torch.Generator, context: GrowthContext) -> RowMasks:
        """See :class:`HidingStrategy`. Without a time, the depth takes its place."""
        count = len(batch.sample_ids)
        config = self.config
        share = progressive_fraction(context.depth, config.schedule, config.start, config.end)
        key = time_key(context.depth if context.time is None else context.time)
        return RowMasks((share,) * count, (key,) * count)


class TimeStepMasking(HidingStrategy):
    """Hides a share of each row that belongs to its time step.

    A time that the phase sets (``GrowthContext.time``) decides. If there is none, the time follows
    from the depth (``time_interpretation: depth``) or is drawn (``input``). In training it is drawn
    from the generator, for the batch or for each sample. In evaluation it is a hash of the sample's
    id, so that the loss does not depend on how samples are batched.

    Args:
        config: options of the strategy, or the config of training in Python.

    Attributes:
        config: as given.
        growth: how time steps are assigned and drawn.
        fractions: the share of hidden positions at each step.
    """

    def __init__(self, config: TimeStepConfig | StackWiseConfig | None = None) -> None:
        self.config = TimeStepConfig() if config is None else config
        self.growth: GrowthConfig
        fractions: Fractions | None
        if isinstance(self.config, StackWiseConfig):
            # A copy: later assignments to the config are for other strategies.
            progressive = attrs.evolve(self.config.training.progressive)
            self.growth = progressive
            fractions = progressive.time_step_fractions
            super().__init__(ReplacementOptions(mask_token_id=progressive.mask_token_id))
        else:
            options = self.config
            self.growth = GrowthConfig(
                num_time_steps=options.num_time_steps,
                time_interpretation=options.time_interpretation,
                time_sampling=options.time_sampling,
                stack_time_mapping=options.stack_time_mapping,
            )
            fractions = options.fractions
            super().__init__(options)
        self.fractions = step_fractions(fractions, self.growth.num_time_steps)

    # --- stacks

    def get_time_step_for_stack(self, stack_idx: int) -> int:
        """Return the time step of a stack, by its index in the order of building.

        Raises:
            UsageProblem: there is no such stack.
            ConfigError: a custom mapping cannot be used.
        """
        return self.growth.time_step(stack_idx, self.growth.max_stacks)

    def generate_masks_for_stack(
        self, batch: Batch | Mapping[str, Any] | Tensor, stack_idx: int
    ) -> Tensor:
        """Return the positions that are hidden when a stack is trained, bool ``[B, S]``.

        A time that is drawn is drawn from a generator with the seed of the config.

        Args:
            batch: token ids ``[B, S]``, a mapping with ``input_ids`` (and ``sample_ids``), or a
                batch of the core.
            stack_idx: index of the stack in the order of building.
        """
        seed = self.growth.seed if isinstance(self.growth, ProgressiveConfig) else 0
        context = growth_context(self.growth, stack_idx, self.growth.max_stacks, seed)
        generator = torch.Generator().manual_seed(seed)
        return self.choose(as_batch(batch), generator, context)[0]

    # --- masks

    def rows(self, batch: Batch, generator: torch.Generator, context: GrowthContext) -> RowMasks:
        """See :class:`HidingStrategy`. Each time is the middle of a time step."""
        steps = self._steps(batch, generator, context)
        times = tuple(time_of_step(step, self.growth.num_time_steps) for step in steps)
        shares = tuple(self.fractions[step] for step in steps)
        return RowMasks(shares, tuple(map(time_key, times)), times)

    def _steps(self, batch: Batch, generator: torch.Generator, context: GrowthContext) -> list[int]:
        """Return the time step of each row."""
        count = len(batch.sample_ids)
        steps = self.growth.num_time_steps
        if context.time is not None:
            return [step_of_time(context.time, steps)] * count
        if self.growth.time_interpretation == "depth":
            return [self._step_at(context.depth)] * count
        if context.training and self.growth.time_sampling == "batch":
            drawn = float(torch.rand((), generator=generator))
            return [step_of_time(drawn, steps)] * count
        # One number of the generator per batch, hashed with each id, so that the order of the rows
        # does not matter.
        salt = int(torch.randint(1 << 62, (), generator=generator)) if context.training else 0
        bits_B1 = counter_hash_rows(batch.sample_ids.cpu(), 1, context.seed, salt, _TIME)
        return [step_of_time(time, steps) for time in uniform_(bits_B1).flatten().tolist()]

    def _step_at(self, depth: float) -> int:
        last = self.growth.num_time_steps - 1
        progress = exponential(depth) if self.growth.stack_time_mapping == "exponential" else depth
        return min(math.floor(progress * last + 1e-9), last)
