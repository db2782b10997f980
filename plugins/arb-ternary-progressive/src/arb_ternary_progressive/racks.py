"""Racks of decoders, and of all other models whose blocks are a decoder's.

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
    """A decoder whose blocks come in stacks; it also generates, with a cache or stack by stack.

    Args:
        config: the options; ``layers`` is not read and follows the stacks.
        vocabulary_size: number of token ids.
        time_embedding: added to what enters the first stack; ``(time) -> [B or 1, 1, D]``. None =
            no time.
        mask_token: what stands for a hidden token; None = the last id of the vocabulary.
        seed: of what is made here, and of the votes of what is ternary in it.
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
        """Logits ``[B, S, V]``; ``cache`` as in a decoder, the other arguments as in a
        :class:`Rack`.

        Raises:
            UsageProblem: the arguments do not go together, or the sequence exceeds the context.
        """
        if hidden is not None and cache is not None:
            raise UsageProblem(
                "cache: it holds what every stack has seen; hidden states enter in the middle"
            )
        if tokens_BS is None or hidden is not None or from_stack:
            return super().forward(tokens_BS, hidden=hidden, from_stack=from_stack, time=time)
        streamed = self._runtime(tokens_BS.size(0)) if cache is None and self.training else cache
        return self.logits(self._run(self.embed(tokens_BS, time), self.blocks, streamed))

    def unroll(self, prompt_ids: Iterable[int], **options: Any) -> Iterator[int]:
        """Token ids drawn stack by stack; see :func:`arb_ternary_progressive.unroll.unrolled`."""
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
    """The rack that has the parts of ``model``; arguments as in :meth:`Rack.from_model`.

    Raises:
        ConfigError: its blocks are not those that its options make, so that a stack could not make
            more of them.
    """
    if not _has_plain_blocks(model):
        raise ConfigError(
            f"model: stacks are made of blocks as a decoder has them; a {type(model).__name__} has "
            f"others",
            "Use `model: {name: decoder, ...}`.",
        )
    kind: Any = type(model)
    return _rack_class(kind).from_model(
        model, precision=precision, time_embedding=time_embedding, mask_token=mask_token, seed=seed
    )


@cache
def _rack_class(model: Any) -> type[Rack]:
    """The class of racks of such models: one that embeds inputs, places positions and gives logits
    as they do.
    """
    if model is Decoder:
        return DecoderRack
    base = DecoderRack if issubclass(model, Decoder) else Rack
    return type(
        f"{model.__name__}Rack",
        (base, model),
        {"__doc__": f"A {model.__name__} whose blocks come in stacks."},
    )


def _has_plain_blocks(model: Transformer) -> bool:
    """Whether the blocks of ``model`` are those that ``Block`` makes of its options."""
    with seeded_birth("plain blocks"), undrawn():
        plain = _kinds(Block(model.config))
    return all(_kinds(block) == plain for block in model.blocks)


def _kinds(module: nn.Module) -> list[tuple[str, type[nn.Module]]]:
    return [(name, type(part)) for name, part in module.named_modules()]
