"""Batches for the stack in training: masked tokens, targets, times and the trunk's hidden states.

Shapes: ``B`` samples, ``S`` positions, ``D`` width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, Final

import torch
from torch import Tensor, nn

from arb_ternary.errors import ConfigError, DataError
from arb_ternary.protocols.data import MaskingStrategy
from arb_ternary_progressive.loader_source import check_not_empty
from arb_ternary_progressive.masking import TimeStepMasking, growth_context
from arb_ternary_progressive.objectives import ObjectiveMasking, clm_mask
from arb_ternary_progressive.samples import as_batch
from arb_ternary_progressive.stackwise import StackWiseConfig
from arb_ternary_progressive.trunk import frozen_version
from arb_ternary_train.activation_cache import ActivationCache, sample_keys
from arb_ternary_train.seeding import derived_generator

#: Budget of the cache.
_CACHE_BYTES: Final = 1 << 30


class ProgressiveDataLoader:
    """The batches of ``base_dataloader``, prepared as the phase does it for one stack.

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
    * ``sample_ids`` int64 ``[B]``: identity of the samples;
    * ``trunk_activations`` float ``[B, S, D]`` or None;
    * every other tensor that the base dataloader gives.

    Masks and times depend on the samples and on ``(seed, stack_idx, epoch, number of the batch)``,
    not on a global generator. If time is an input, it is drawn anew for each batch.

    Args:
        base_dataloader: gives batches: mappings with ``input_ids``, tensors, tuples, batches of the
            core. For more than one epoch it must not be an iterator.
        masking_strategy: None = every position counts, and nothing is hidden.
        stack_idx: index of the stack in training, in the order of building.
        trunk_activations: the hidden states that enter the stack: a trunk, ``(input_ids) -> [B, S,
            D]``, or a tensor for every batch. None = the model starts at the tokens.
        cache_activations: compute the hidden states of a sample once. The trunk must be frozen.
        config: objective, vocabulary, times and seed; None = that of a ``TimeStepMasking``.

    Raises:
        ConfigError: a strategy hides tokens of an unknown vocabulary.
        UsageProblem: there is no such stack, or the trunk cannot be cached.
    """

    def __init__(
        self,
        base_dataloader: Iterable[Any],
        masking_strategy: MaskingStrategy | None = None,
        stack_idx: int = 0,
        trunk_activations: nn.Module | Tensor | None = None,
        cache_activations: bool = False,
        *,
        config: StackWiseConfig | None = None,
    ) -> None:
        if config is None and isinstance(masking_strategy, TimeStepMasking):
            given = masking_strategy.config
            config = given if isinstance(given, StackWiseConfig) else None
        if config is None and masking_strategy is not None:
            raise ConfigError(
                "config: the vocabulary must be known to hide tokens, and the masking strategy "
                "does not know it",
                "Give ProgressiveDataLoader(..., config=...).",
            )
        self.config = StackWiseConfig() if config is None else config
        progressive = self.config.training.progressive
        self.base_dataloader = base_dataloader
        self.stack_idx = stack_idx
        self.trunk_activations = trunk_activations
        self.training_objective = progressive.training_objective
        self._masking = ObjectiveMasking(masking_strategy, self.training_objective)
        self._context = growth_context(
            progressive,
            stack_idx,
            progressive.max_stacks,
            progressive.seed,
            vocabulary_size=self.config.model.vocab_size,
        )
        self._epoch = -1
        self._version = ""
        self._cache: ActivationCache | None = None
        if cache_activations and isinstance(trunk_activations, nn.Module):
            # Refuse a trunk that learns now, not at the first batch.
            frozen_version(trunk_activations)
            self._cache = ActivationCache(_CACHE_BYTES)

    def __len__(self) -> int:
        """Return the number of batches per epoch if the base dataloader knows it."""
        if not isinstance(self.base_dataloader, Sized):
            raise TypeError(
                f"the base dataloader, a {type(self.base_dataloader).__name__}, has no length"
            )
        return len(self.base_dataloader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the batches of one epoch.

        Raises:
            DataError: the base dataloader gives no batch, or one that cannot be used.
        """
        self._epoch += 1
        trunk = self.trunk_activations
        if self._cache is not None and isinstance(trunk, nn.Module):
            self._version = frozen_version(trunk)
        count = 0
        for count, raw in enumerate(self.base_dataloader, start=1):
            yield self._prepare(raw, count - 1)
        check_not_empty(self.base_dataloader, self._epoch, count)

    def _prepare(self, raw: Any, number: int) -> dict[str, Any]:
        given = as_batch(raw)
        ids_B = given.sample_ids
        generator = derived_generator(
            self._context.seed, "progressive", self.stack_idx, self._epoch, number
        )
        made, masks_BS = self._masking.prepare(given, generator, self._context)
        time_B = torch.zeros(len(ids_B)) if made.times is None else made.times
        # Times are middles of steps, so rounding errors do not matter.
        steps_B = (time_B * self.config.training.progressive.num_time_steps).floor()
        batch: dict[str, Any] = {
            **given.extras,
            "input_ids": made.inputs,
            "targets": made.targets,
            "masks": masks_BS,
            "loss_mask": made.loss_mask,
            "time_step": steps_B.to(torch.int64),
            "time": time_B,
            "stack_idx": self.stack_idx,
            "training_objective": self.training_objective,
            "sample_ids": ids_B,
            "trunk_activations": self._hidden(made.inputs, ids_B, time_B),
        }
        if self.training_objective == "clm":
            batch["clm_mask"] = clm_mask(masks_BS)
            batch["combined_masks"] = made.loss_mask
        return batch

    def _hidden(self, inputs_BS: Tensor, ids_B: Tensor, time_B: Tensor) -> Tensor | None:
        """Return the hidden states that enter the stack, ``[B, S, D]``."""
        trunk = self.trunk_activations
        if trunk is None:
            return None
        if isinstance(trunk, Tensor):
            hidden_BSD = trunk
        else:
            hidden_BSD = self._through(trunk, inputs_BS, ids_B, time_B)
        if hidden_BSD.shape[:2] != inputs_BS.shape:
            raise DataError(
                f"trunk_activations: hidden states of shape {list(hidden_BSD.shape)} do not belong "
                f"to inputs of shape {list(inputs_BS.shape)}"
            )
        return hidden_BSD.to(inputs_BS.device)

    def _through(
        self, trunk: nn.Module, inputs_BS: Tensor, ids_B: Tensor, time_B: Tensor
    ) -> Tensor:
        """Run a batch through the trunk; only the rows that are missing if there is a cache."""
        timed = self.config.training.progressive.time_interpretation == "input"

        @torch.no_grad()
        def compute(rows: list[int]) -> Tensor:
            times = {"time": time_B[rows]} if timed else {}
            hidden_MSD: Tensor = trunk(inputs_BS[rows], **times)
            return hidden_MSD

        if self._cache is None:
            return compute(list(range(len(inputs_BS))))
        keys = sample_keys(ids_B, inputs_BS, time_B.tolist() if timed else None)
        return torch.stack(self._cache.fetch(self._version, keys, compute))
