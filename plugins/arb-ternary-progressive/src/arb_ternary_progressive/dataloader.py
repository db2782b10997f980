"""Batches for the stack in training: masked tokens, targets, times and the trunk's hidden states.

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
from arb_ternary_progressive.loader_source import Epochs
from arb_ternary_progressive.masking import GrowthContext, TimeStepMasking
from arb_ternary_progressive.objectives import ObjectiveMasking
from arb_ternary_progressive.samples import as_samples, cache_keys
from arb_ternary_progressive.time import depth_of
from arb_ternary_train.seeding import derived_generator

#: The trunk's hidden states ``[B, S, D]``: a function of the batch, a frozen trunk, the states
#: ``[S, D]`` by cache key, or one tensor for every batch.
TrunkActivations: TypeAlias = (
    Callable[[dict[str, Any]], Tensor] | nn.Module | Mapping[int, Tensor] | Tensor
)


class ProgressiveDataLoader:
    """The batches of ``base_dataloader``, prepared for the training of one stack.

    Each iteration is an epoch. A batch is a dict:

    * ``input_ids`` int64 ``[B, S]``: the input of the model. Only the objective ``mlm`` hides
      tokens in it;
    * ``targets`` int64 ``[B, S]`` and ``loss_mask`` bool ``[B, S]``: targets, and where they count;
    * ``masks`` bool ``[B, S]``: the positions that the strategy chose;
    * ``clm_mask`` and ``combined_masks`` bool ``[B, S]``, with the objective ``clm``: every
      position but the last, and ``masks & clm_mask``;
    * ``time_step`` int64 ``[B]`` and ``time`` float32 ``[B]``, the middle of the step; 0 for a
      strategy without time;
    * ``stack_idx``, ``training_objective``;
    * ``sample_ids`` and ``cache_keys`` int64 ``[B]``: identity of the samples, and their keys in a
      cache;
    * ``trunk_activations`` float ``[B, S, D]`` or None;
    * everything else that the base dataloader gives.

    Masks and times depend on the samples and on ``(seed, stack_idx, epoch, number of the batch)``,
    not on a global generator. If time is an input, it is drawn anew for each batch.

    Args:
        base_dataloader: gives batches: mappings with ``input_ids``, tensors, tuples, batches of the
            core. For more than one epoch it must not be an iterator.
        masking_strategy: None = every position counts, and nothing is hidden.
        stack_idx: index of the stack in training, in the order of building.
        trunk_activations: the hidden states that enter the stack; see ``TrunkActivations``. None =
            the model starts at the tokens.
        cache_activations: compute the hidden states of a sample once. A module as
            ``trunk_activations`` must be frozen then; a function must have its own cache (attribute
            ``cache``).
        training_objective: ``mlm``, ``clm`` or ``custom``; None = that of the strategy's config,
            else ``mlm``.
        final_depth: stacks of the finished rack; None = that of the strategy, else ``stack_idx +
            1``.
        vocabulary_size: number of token ids; None = that of the strategy's config.
        seed: seed of masks and times; None = that of the strategy, else 0.
        cache: cache of a module's hidden states; None = one of 1 GiB in memory.

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
        self.stack_idx = stack_idx
        self.trunk_activations = trunk_activations
        self.cache_activations = cache_activations
        self._timed: TimeStepMasking | None = None
        if isinstance(masking_strategy, TimeStepMasking):
            self._timed = masking_strategy
            training_objective = training_objective or masking_strategy.training_objective
            final_depth = final_depth or masking_strategy.final_depth
            vocabulary_size = vocabulary_size or masking_strategy.vocabulary_size
            seed = masking_strategy.seed if seed is None else seed
        self._masking = ObjectiveMasking(masking_strategy, training_objective or "mlm")
        self.training_objective = self._masking.objective
        self.final_depth = final_depth or stack_idx + 1
        self.depth = depth_of(stack_idx, self.final_depth)
        self.seed = seed or 0
        hides = masking_strategy is not None and self.training_objective == "mlm"
        if hides and vocabulary_size is None:
            raise ConfigError(
                "vocabulary_size: must be known to hide tokens, and the masking strategy does not "
                "know it",
                "Give ProgressiveDataLoader(..., vocabulary_size=...).",
            )
        self.vocabulary_size = vocabulary_size
        self._epochs = Epochs(base_dataloader)
        self._cache = self._checked_cache(cache)
        self._version = ""
        self._width: int | None = None

    def __len__(self) -> int:
        """Return the number of batches per epoch if the base dataloader knows it."""
        if not isinstance(self.base_dataloader, Sized):
            raise TypeError(
                f"the base dataloader, a {type(self.base_dataloader).__name__}, has no length"
            )
        return len(self.base_dataloader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the batches of one epoch; after :meth:`load_state_dict`, the rest of it.

        Raises:
            DataError: the base dataloader gives no batch, or one that cannot be used.
        """
        batches = self._epochs.start()
        if self._cache is not None and isinstance(self.trunk_activations, nn.Module):
            self._version = trunk_version(self.trunk_activations)
        for raw in batches:
            yield self._prepare(raw)

    @property
    def epoch(self) -> int:
        """The epoch that was begun last, from 0."""
        return self._epochs.epoch

    @property
    def activation_cache(self) -> ActivationCache | None:
        """The cache of a module's hidden states; None if nothing is cached."""
        return self._cache

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and the number of batches of it that were given."""
        return self._epochs.state_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from ``state`` in the next iteration.

        The base dataloader must repeat its order.
        """
        self._epochs.load_state_dict(state)

    # --- one batch

    @property
    def _time_is_input(self) -> bool:
        return self._timed is not None and self._timed.time_is_input

    def _prepare(self, raw: Any) -> dict[str, Any]:
        samples = as_samples(raw)
        ids_B = samples.sample_ids
        number = self._epochs.position - 1
        generator = derived_generator(self.seed, "progressive", self.stack_idx, self.epoch, number)
        made = self._masking.prepare(samples.batch(), generator, self._context())

        time_B = torch.zeros(len(ids_B), device=ids_B.device)
        steps_B = torch.zeros(len(ids_B), dtype=torch.int64, device=ids_B.device)
        if self._timed is not None and made.times is not None:
            time_B = made.times.to(ids_B.device)
            # Times are middles of steps, so rounding errors do not matter.
            steps_B = (time_B * self._timed.growth.num_time_steps).floor().to(torch.int64)

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
            "sample_ids": ids_B,
            "cache_keys": cache_keys(ids_B, time_B if self._time_is_input else None),
        }
        if made.clm_mask is not None:
            batch["clm_mask"] = made.clm_mask
            batch["combined_masks"] = made.loss_mask
        batch["trunk_activations"] = self._hidden(batch)
        return batch

    def _context(self) -> GrowthContext:
        time = None
        if self._timed is not None and not self._time_is_input:
            time = self._timed.time_for_stack(self.stack_idx, final_depth=self.final_depth)
        return GrowthContext(
            step=0,
            seed=self.seed,
            vocabulary_size=self.vocabulary_size or 0,
            depth=self.depth,
            time=time,
        )

    # --- the trunk

    def _hidden(self, batch: dict[str, Any]) -> Tensor | None:
        """Return the hidden states that enter the stack, ``[B, S, D]``."""
        source = self.trunk_activations
        inputs_BS = batch["input_ids"]
        if source is None:
            return None
        if isinstance(source, Tensor):
            hidden_BSD = source
        elif isinstance(source, Mapping):
            hidden_BSD = _by_key(source, batch["cache_keys"])
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
        """Run a batch through the trunk; only the rows that are missing if there is a cache."""
        inputs_BS = batch["input_ids"]

        @torch.no_grad()
        def compute(rows_M: Tensor) -> Tensor:
            times = {"time": batch["time"][rows_M]} if self._time_is_input else {}
            hidden_MSD: Tensor = trunk(inputs_BS[rows_M], **times)
            return hidden_MSD

        if self._cache is None:
            return compute(torch.arange(len(inputs_BS)))
        if self._width is None:
            self._width = compute(torch.arange(1)).shape[-1]
        return self._cache.fetch(
            batch["cache_keys"], self._version, inputs_BS, self._width, compute
        )

    def _checked_cache(self, cache: ActivationCache | None) -> ActivationCache | None:
        """Return the cache to use, or raise UsageProblem if caching is not possible."""
        source = self.trunk_activations
        if isinstance(source, nn.Module) and self.cache_activations:
            # Refuse a trunk that learns now, not at the first batch.
            trunk_version(source)
            return ActivationCache() if cache is None else cache
        if cache is not None:
            raise UsageProblem(
                "cache: there is nothing to keep in it",
                "It keeps what a module computes: give the trunk as trunk_activations, and "
                "cache_activations=True.",
            )
        is_function = callable(source) and not isinstance(source, nn.Module)
        if self.cache_activations and is_function and getattr(source, "cache", None) is None:
            raise UsageProblem(
                "cache_activations: a function does not say which trunk it runs, so a changed one "
                "would not be noticed",
                "Give the frozen trunk itself (a module), or a function with its own cache "
                "(attribute `cache`).",
            )
        return None


def _by_key(hidden: Mapping[int, Tensor], keys_B: Tensor) -> Tensor:
    """Return the hidden states of the samples with these keys."""
    keys = keys_B.tolist()
    absent = [key for key in keys if key not in hidden]
    if absent:
        raise DataError(
            f"trunk_activations: there are no hidden states for {len(absent)} of {len(keys)} "
            f"samples, such as {absent[0]}",
            "Give the trunk itself, so that missing states can be computed.",
        )
    return torch.stack([hidden[key] for key in keys])
