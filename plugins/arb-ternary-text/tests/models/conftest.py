"""Small decoders in float64, so that different computations agree to a few rounding errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder

VOCABULARY = 11


@pytest.fixture(scope="session")
def float_config() -> Callable[..., DecoderConfig]:
    """Return a factory of small configs without ternary parts or rounding of activations."""

    def make(**changes: Any) -> DecoderConfig:
        options: dict[str, Any] = {
            "width": 16,
            "layers": 2,
            "heads": 4,
            "feed_forward": 24,
            "max_length": 32,
            "activations": "float",
            "float_parts": ("embedding", "head", "norms", "linears"),
        }
        return DecoderConfig(**(options | changes))

    return make


@pytest.fixture(scope="session")
def float_decoder(float_config: Callable[..., DecoderConfig]) -> Callable[..., Decoder]:
    """Return a factory of small float64 decoders with gains that are not 1."""

    def make(**changes: Any) -> Decoder:
        model = Decoder(float_config(**changes), VOCABULARY)
        model.set_dtype(torch.float64)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.uniform_(0.5, 1.5)
        return model.eval()

    return make


@pytest.fixture(scope="session")
def tokens() -> Callable[..., torch.Tensor]:
    """Return a factory of random token ids."""

    def make(batch: int, length: int, seed: int = 0) -> torch.Tensor:
        return torch.randint(
            0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed)
        )

    return make


@pytest.fixture(scope="session")
def rounding() -> Callable[[Decoder, int], float]:
    """Return a bound for the difference of two float64 evaluations of a small decoder.

    A dot product of K terms of unit variance carries an error of at most K unit roundoffs of their
    sum of magnitudes, itself about sqrt(K) times the result; a block has six of them (widths,
    hidden width, visible positions), each followed by a norm that keeps relative errors, and its
    non-linearity at most doubles them.
    """

    def bound(model: Decoder, length: int) -> float:
        config = model.config
        longest = max(config.width, config.hidden, length)
        return float(config.layers * 6 * 2 * longest**1.5 * torch.finfo(torch.float64).eps)

    return bound
