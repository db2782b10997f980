"""Single-pass sampling from a rack that fills in hidden tokens.

A rack that was built from right to left is a chain of denoising steps laid out in depth. Its last
stack was trained on lightly hidden text, and each stack before it on more heavily hidden text, with
the later stacks frozen. One pass through the rack is the whole chain: the new tokens are all
hidden, the rack runs once, and every hidden token is drawn from the logits at its position.

If prompt and new tokens exceed the context, the text is drawn in pieces. Each pass sees the latest
half of the context and draws as many tokens as fit after it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arb_ternary.errors import UsageProblem
from arb_ternary_progressive.time import discrete_time
from arb_ternary_text.models.generate import draw_token, next_token_probabilities

if TYPE_CHECKING:
    from arb_ternary_progressive.rack import DecoderRack


def unrolled(
    rack: DecoderRack,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: Collection[int] = (),
    device: torch.device | str = "cpu",
) -> Iterator[int]:
    """Return an iterator over the token ids that follow ``prompt_ids``.

    The tokens of one pass are drawn independently of each other.

    Args:
        rack: trained to fill in hidden tokens; not causal.
        prompt_ids: the tokens before; may be empty.
        max_new_tokens: number of tokens to draw.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: sample only from this many of the most likely tokens; None = all.
        top_p: sample only from the most likely tokens whose probabilities add up to this; None =
            all.
        seed: seed of the draws; None = random.
        stop: ids that end the text; they are not yielded.
        device: device of the rack.

    Raises:
        UsageProblem: the rack is causal, or a value is out of range; raised by this call, not by
            the first ``next()``.
    """
    next_token_probabilities(torch.zeros(1), temperature, top_k, top_p)
    if rack.config.causal:
        raise UsageProblem(
            "unroll: the model is causal: it predicts the next token, not hidden tokens",
            "Generate without --unroll, or train with `causal: false` and a masking strategy that "
            "hides tokens.",
        )
    if max_new_tokens < 0:
        raise UsageProblem(f"max_new_tokens: must be at least 0, not {max_new_tokens}")
    for token in prompt_ids:
        if not 0 <= token < rack.vocabulary_size or token == rack.mask_token:
            raise UsageProblem(
                f"prompt: token ids must be from 0 to {rack.vocabulary_size - 1} and not the mask "
                f"token, not {token}"
            )
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)

    def drawn() -> Iterator[int]:
        text = list(prompt_ids)
        left = max_new_tokens
        while left:
            seen, new = _window(len(text), left, rack.max_length)
            for logits_V in _one_pass(rack, text[len(text) - seen :], new, torch.device(device)):
                token = draw_token(
                    next_token_probabilities(logits_V, temperature, top_k, top_p), generator
                )
                if token in stop:
                    return
                text.append(token)
                yield token
            left -= new

    return drawn()


def _window(known: int, wanted: int, context: int) -> tuple[int, int]:
    """Return how many known tokens a pass sees, and how many it draws."""
    if known + wanted <= context:
        return known, wanted
    seen = min(known, context // 2)
    return seen, min(wanted, context - seen)


@torch.no_grad()
def _one_pass(rack: DecoderRack, seen: list[int], new: int, device: torch.device) -> Tensor:
    """Return logits ``[new, V]`` of the hidden tokens after ``seen``, without the mask token."""
    tokens_1S = torch.tensor([[*seen, *[rack.mask_token] * new]], dtype=torch.int64, device=device)
    options: dict[str, Any] = {}
    if rack.time_embedding is not None:
        steps: Any = rack.time_embedding.num_time_steps
        options["time"] = discrete_time(1.0, int(steps))
    logits_1SV: Tensor = rack(tokens_1S, **options)
    logits_NV: Tensor = logits_1SV[0, len(seen) :].float().cpu()
    logits_NV[:, rack.mask_token] = -math.inf
    return logits_NV
