"""Racks of decoders, and of other models with the blocks of a decoder.

Shapes: ``B`` sequences, ``S`` positions, ``D`` width, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from torch import Tensor, nn

from arb_ternary.errors import ConfigError, UsageProblem
from arb_ternary_progressive.config import Precision
from arb_ternary_progressive.rack import Rack, Stacks
from arb_ternary_progressive.stack import seeded_birth
from arb_ternary_text.models.block import Block
from arb_ternary_text.models.cache import KeyValueCache
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.transformer import Transformer
from arb_ternary_train.build import undrawn


class DecoderRack(Rack, Decoder):
    """A decoder whose blocks are grouped in stacks; it generates with a cache or by unrolling.

    Args:
        config: the options; ``layers`` is ignored and follows from the stacks.
        vocabulary_size: number of token ids.
        time_embedding: added to the input of the first stack; ``(time) -> [B or 1, 1, D]``. None =
            no time.
        mask_token: id of the mask token; None = the last id of the vocabulary.
        seed: seed of new parts, and of the votes of their ternary modules.
    """

    blocks: Stacks

    def __init__(
        self,
        config: DecoderConfig,
        vocabulary_size: int,
        *,
        time_embedding: nn.Module | None = None,
        mask_token: int | None = None,
        seed: int = 0,
    ) -> None:
        with seeded_birth(seed, "rack"):
            super().__init__(config, vocabulary_size, blocks=Stacks())
        self._become_a_rack(time_embedding, mask_token, seed)
        self._seed_new_votes(())

    def forward(
        self,
        tokens_BS: Tensor | None,
        cache: KeyValueCache | None = None,
        *,
        hidden: Tensor | None = None,
        from_stack: int = 0,
        time: float | Tensor | None = None,
    ) -> Tensor:
        """Return logits ``[B, S, V]``.

        ``cache`` is as in a decoder, the other arguments are as in :class:`Rack`.

        Raises:
            UsageProblem: the arguments do not go together, or the sequence exceeds the context.
        """
        if hidden is not None and cache is not None:
            raise UsageProblem(
                "cache: it cannot be used with hidden states, which skip the first stacks"
            )
        if tokens_BS is None or hidden is not None or from_stack:
            return super().forward(tokens_BS, hidden=hidden, from_stack=from_stack, time=time)
        streamed = self._runtime(tokens_BS.size(0)) if cache is None and self.training else cache
        return self.logits(self._run(self.embed(tokens_BS, time), self.blocks, streamed))

    def unroll(self, prompt_ids: Iterable[int], **options: Any) -> Iterator[int]:
        """Return token ids of single-pass sampling; see
        :func:`arb_ternary_progressive.unroll.unrolled`.
        """
        from arb_ternary_progressive.unroll import unrolled

        drawn: Iterator[int] = unrolled(self, list(prompt_ids), **options)
        return drawn


def as_rack(
    model: Transformer,
    *,
    precision: Precision,
    time_embedding: nn.Module | None = None,
    mask_token: int | None = None,
    seed: int = 0,
) -> Rack:
    """Return a rack that takes over the parts of ``model``; arguments as in
    :meth:`Rack.from_model`.

    Raises:
        ConfigError: its blocks are not those that its options describe, so more of them cannot be
            made.
    """
    if not _has_plain_blocks(model):
        raise ConfigError(
            f"model: stacks are made of the blocks of a decoder; a {type(model).__name__} has "
            f"others",
            "Use `model: {name: decoder, ...}`.",
        )
    kind: Any = type(model)
    return _rack_class(kind).from_model(
        model, precision=precision, time_embedding=time_embedding, mask_token=mask_token, seed=seed
    )


@cache
def _rack_class(model: Any) -> type[Rack]:
    """Return the class of racks of a class of models.

    It embeds inputs, places positions and makes logits like them.
    """
    if model is Decoder:
        return DecoderRack
    base = DecoderRack if issubclass(model, Decoder) else Rack
    return type(
        f"{model.__name__}Rack",
        (base, model),
        {"__doc__": f"A {model.__name__} whose blocks are grouped in stacks."},
    )


def _has_plain_blocks(model: Transformer) -> bool:
    """Return whether the blocks of ``model`` are those that ``Block`` makes from its options."""
    with seeded_birth("plain blocks"), undrawn():
        plain = _kinds(Block(model.config))
    return all(_kinds(block) == plain for block in model.blocks)


def _kinds(module: nn.Module) -> list[tuple[str, type[nn.Module]]]:
    return [(name, type(part)) for name, part in module.named_modules()]
