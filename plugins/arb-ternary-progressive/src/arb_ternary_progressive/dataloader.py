"""Batches for the stack that is being trained: hidden tokens, targets, time, and what the trunk
made of the inputs.

Shapes: ``B`` samples, ``S`` positions, ``D`` width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from arb_ternary.errors import ConfigError, DataError, UsageProblem
from arb_ternary.protocols.data import MaskingStrategy
from arb_ternary_progressive.activation_cache import ActivationCache, trunk_version
from arb_ternary_progressive.masking import GrowthContext
from arb_ternary_progressive.masking_time_step import TimeStepMasking
from arb_ternary_progressive.objectives import ObjectiveMasking
from arb_ternary_progressive.passes import Passes
from arb_ternary_progressive.samples import Samples, as_samples, cache_keys
from arb_ternary_progressive.time import depth_of
from arb_ternary_train.seeding import derived_generator

# : The trunk's hidden states ``[B, S, D]``: a function of the batch, a frozen trunk, the states
# ``[S, D]`` by cache key, : or those of every batch.
TrunkActivations: TypeAlias = (
    Callable[[dict[str, Any]], Tensor] | nn.Module | Mapping[int, Tensor] | Tensor
)


class ProgressiveDataLoader:
    """The batches of ``base_dataloader`` as stack ``stack_idx`` is trained on them. Each pass over
    it is an epoch.

    A batch is a dict:

    * ``input_ids`` int64 ``[B, S]``: what the model reads. Only the objective ``mlm`` hides tokens
      in it;
    * ``targets`` int64 ``[B, S]`` and ``loss_mask`` bool ``[B, S]``: what is asked, and where it
      counts;
    * ``masks`` bool ``[B, S]``: the positions that the strategy chose;
    * ``clm_mask`` and ``combined_masks`` bool ``[B, S]``, with the objective ``clm``: every
      position but the last, and ``masks & clm_mask``;
    * ``time_step`` int64 ``[B]`` and ``time`` float32 ``[B]``, the middle of the step; 0 for a
      strategy without time;
    * ``stack_idx``, ``training_objective``;
    * ``sample_ids`` and ``cache_keys`` int64 ``[B]``: identity of the samples, and by what a cache
      knows them;
    * ``trunk_activations`` float ``[B, S, D]`` or None;
    * whatever else the base dataloader gave.

    Masks and times depend on the samples and on ``(seed, stack_idx, epoch, number of the batch)``,
    on no global generator. Where time is an input it is drawn anew for each batch.

    Args:
        base_dataloader: gives batches: mappings with ``input_ids``, tensors, tuples, batches of the
            core. For more than one epoch it must not be an iterator.
        masking_strategy: None = every position counts, and nothing is hidden.
        stack_idx: the stack in training, counted in the order of building.
        trunk_activations: the hidden states that enter the stack; see ``TrunkActivations``. None =
            the model starts at the tokens.
        cache_activations: compute the hidden states of a sample once. A module as
            ``trunk_activations`` must then be frozen; a function must have a cache of its own
            (attribute ``cache``); tensors are there already.
        training_objective: ``mlm``, ``clm`` or ``custom``; None = what the strategy's config says,
            else ``mlm``.
        final_depth: stacks of the finished rack; None = what the strategy knows, else ``stack_idx +
            1``.
        vocabulary_size: number of token ids; None = what the strategy's config says.
        seed: of masks and times; None = that of the strategy, else 0.
        cache: where a module's hidden states are kept; None = one of 1 GiB in memory.

    Raises:
        ConfigError: the objective is unknown or does not go with the strategy, or the vocabulary is
            not known.
        UsageProblem: there is no such stack, or ``trunk_activations`` cannot be cached.
    """

    def __init__(
        self,
        base_dataloader: Iterable[Any],
        masking_strategy: MaskingStrategy | None = None,
        stack_idx: int = 0,
        trunk_activations: TrunkActivations | None = None,
        cache_activations: bool = False,
        *,
        training_objective: str | None = None,
        final_depth: int | None = None,
        vocabulary_size: int | None = None,
        seed: int | None = None,
        cache: ActivationCache | None = None,
    ) -> None:
        self.base_dataloader = base_dataloader
        self.masking_strategy = masking_strategy
        self.stack_idx = stack_idx
        self.trunk_activations = trunk_activations
        self.cache_activations = cache_activations
        objective = (
            training_objective or getattr(masking_strategy, "training_objective", None) or "mlm"
        )
        self._masking = ObjectiveMasking(masking_strategy, objective)
        self.training_objective = self._masking.objective
        self.final_depth: int = (
            final_depth or getattr(masking_strategy, "final_depth", None) or stack_idx + 1
        )
        self.depth = depth_of(stack_idx, self.final_depth)
        self.seed: int = getattr(masking_strategy, "seed", 0) if seed is None else seed
        self.vocabulary_size: int | None = vocabulary_size or getattr(
            masking_strategy, "vocabulary_size", None
        )
        self._passes = Passes(base_dataloader)
        self._require_vocabulary()
        self._cache = self._own_cache(cache)
        self._version = ""
        self._width: int | None = None

    def __len__(self) -> int:
        """Batches an epoch, where the base dataloader knows."""
        if not isinstance(self.base_dataloader, Sized):
            raise TypeError(
                f"the base dataloader, a {type(self.base_dataloader).__name__}, has no length"
            )
        return len(self.base_dataloader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The batches of one epoch; after :meth:`load_state_dict`, those that are left of it.

        Raises:
            DataError: the base dataloader gives no batch, or one that cannot be used.
        """
        batches = self._passes.start()
        if self._cache is not None and isinstance(self.trunk_activations, nn.Module):
            self._version = trunk_version(self.trunk_activations)
        for raw in batches:
            yield self._prepare(raw, self._passes.position - 1)

    @property
    def epoch(self) -> int:
        """The pass that was begun last, from 0."""
        return self._passes.epoch

    @property
    def activation_cache(self) -> ActivationCache | None:
        """Where the hidden states of a module are kept; None where there is nothing to keep."""
        return self._cache

    def state_dict(self) -> dict[str, int]:
        """Where the next batch is: the epoch, and the number of batches of it that were given."""
        return self._passes.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """The next pass goes on where ``state`` was taken, provided that the base dataloader
        repeats its order.
        """
        self._passes.load_state_dict(state)

    # --- one batch

    def _prepare(self, raw: Any, number: int) -> dict[str, Any]:
        samples = as_samples(raw)
        generator = derived_generator(self.seed, "progressive", self.stack_idx, self.epoch, number)
        made = self._masking.prepare(samples.batch(), generator, self._context())
        time_B, steps_B = self._times(samples, made.times)
        batch: dict[str, Any] = {
            **samples.extras,
            "input_ids": made.inputs,
            "targets": made.targets,
            "masks": made.masks,
            "loss_mask": made.loss_mask,
            "time_step": steps_B,
            "time": time_B,
            "stack_idx": self.stack_idx,
            "training_objective": self.training_objective,
            "sample_ids": samples.sample_ids,
            "cache_keys": cache_keys(
                samples.sample_ids, steps_B if self._time_is_an_input() else None
            ),
        }
        if made.clm_mask is not None:
            batch["clm_mask"] = made.clm_mask
            batch["combined_masks"] = made.loss_mask
        batch["trunk_activations"] = self._hidden(batch)
        return batch

    def _context(self) -> GrowthContext:
        strategy = self.masking_strategy
        time = None
        if isinstance(strategy, TimeStepMasking) and not self._time_is_an_input():
            time = strategy.time_for_stack(self.stack_idx, final_depth=self.final_depth)
        return GrowthContext(
            step=0,
            seed=self.seed,
            vocabulary_size=self.vocabulary_size or 0,
            depth=self.depth,
            time=time,
        )

    def _times(self, samples: Samples, time_B: Tensor | None) -> tuple[Tensor, Tensor]:
        """The time of each sample, and its step; 0 where the strategy has none."""
        strategy = self.masking_strategy
        ids_B = samples.sample_ids
        if time_B is None or not isinstance(strategy, TimeStepMasking):
            return torch.zeros(len(ids_B)), torch.zeros(len(ids_B), dtype=torch.int64)
        # Times are middles of steps: half a step from where rounding down would matter.
        steps_B = (time_B * strategy.num_time_steps).floor().to(torch.int64)
        return time_B.to(ids_B.device), steps_B.to(ids_B.device)

    def _time_is_an_input(self) -> bool:
        strategy = self.masking_strategy
        return isinstance(strategy, TimeStepMasking) and strategy.time_interpretation == "input"

    # --- the trunk

    def _hidden(self, batch: dict[str, Any]) -> Tensor | None:
        source = self.trunk_activations
        inputs_BS = batch["input_ids"]
        if source is None:
            return None
        if isinstance(source, Tensor):
            hidden_BSD = source
        elif isinstance(source, Mapping):
            hidden_BSD = _gathered(source, batch["cache_keys"])
        elif isinstance(source, nn.Module):
            hidden_BSD = self._through(source, batch)
        else:
            hidden_BSD = source(batch)
        if hidden_BSD.shape[:2] != inputs_BS.shape:
            raise DataError(
                f"trunk_activations: hidden states of shape {list(hidden_BSD.shape)} do not belong "
                f"to inputs of shape {list(inputs_BS.shape)}"
            )
        return hidden_BSD.to(inputs_BS.device)

    def _through(self, trunk: nn.Module, batch: dict[str, Any]) -> Tensor:
        inputs_BS = batch["input_ids"]
        time_B = batch["time"]

        def compute(rows_M: Tensor) -> Tensor:
            with torch.no_grad():
                times = {"time": time_B[rows_M]} if self._time_is_an_input() else {}
                hidden_MSD: Tensor = trunk(inputs_BS[rows_M], **times)
            return hidden_MSD

        if self._cache is None:
            return compute(torch.arange(len(inputs_BS)))
        if self._width is None:
            self._width = compute(torch.arange(1)).shape[-1]
        return self._cache.fetch(
            batch["cache_keys"], self._version, inputs_BS, self._width, compute
        )

    def _own_cache(self, cache: ActivationCache | None) -> ActivationCache | None:
        source = self.trunk_activations
        if isinstance(source, nn.Module) and self.cache_activations:
            trunk_version(source)  # refuses a trunk that learns, now and not at the first batch
            return ActivationCache() if cache is None else cache
        if cache is not None:
            raise UsageProblem(
                "cache: there is nothing to keep in it",
                "It keeps what a module computes: give the trunk as trunk_activations, and "
                "cache_activations=True.",
            )
        is_function = callable(source) and not isinstance(source, Tensor | nn.Module | Mapping)
        if self.cache_activations and is_function and getattr(source, "cache", None) is None:
            raise UsageProblem(
                "cache_activations: a function does not say which trunk it runs, so that a changed "
                "one would go unseen",
                "Give the frozen trunk itself (a module), or a function with a cache of its own "
                "(attribute `cache`).",
            )
        return None

    def _require_vocabulary(self) -> None:
        if (
            self.vocabulary_size is None
            and self.masking_strategy is not None
            and self.training_objective == "mlm"
        ):
            raise ConfigError(
                "vocabulary_size: must be known to hide tokens, and the masking strategy does not "
                "know it",
                "Give ProgressiveDataLoader(..., vocabulary_size=...).",
            )


def _gathered(hidden: Mapping[int, Tensor], keys_B: Tensor) -> Tensor:
    absent = [key for key in keys_B.tolist() if key not in hidden]
    if absent:
        raise DataError(
            f"trunk_activations: there are no hidden states for {len(absent)} of {len(keys_B)} "
            f"samples, such as {absent[0]}",
            "Give the trunk itself, so that what is missing can be computed.",
        )
    return torch.stack([hidden[key] for key in keys_B.tolist()])
