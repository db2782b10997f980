"""Presets of architectures: what they decide and refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder

SMALL: dict[str, Any] = {"width": 32, "layers": 1, "heads": 4, "max_length": 8}
#: Activation, sub-norms, norms of queries and keys, tied head, as other programs define them.
DECIDES = {
    "llama": ("swiglu", False, False, False),
    "qwen3": ("swiglu", False, True, False),
    "arcee": ("relu2", False, False, False),
    "bitnet": ("swiglu", True, False, True),
    None: ("relu2", True, False, False),
}


@pytest.mark.parametrize("name", DECIDES)
def test_a_preset_decides_what_the_config_leaves_open(name: str | None) -> None:
    config = DecoderConfig(**SMALL, architecture=name)  # type: ignore[arg-type]
    found = (
        config.feed_forward_activation,
        config.has_sub_norms,
        config.has_query_key_norm,
        config.tied,
    )
    assert found == DECIDES[name]
    model = Decoder(config, 11)
    names = {
        path.removeprefix("blocks.0.")
        for path, _ in model.named_modules()
        if path.startswith("blocks.0.")
    }
    assert ("feed_forward.gate" in names) == (found[0] != "relu2")
    assert (
        type(model.get_submodule("blocks.0.attention.output_norm")) is not torch.nn.Identity
    ) == found[1]
    assert (
        type(model.get_submodule("blocks.0.attention.key_norm")) is not torch.nn.Identity
    ) == found[2]
    assert model(torch.zeros(1, 3, dtype=torch.int64)).shape == (1, 3, 11)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"architecture": "llama", "sub_norms": True},
            "use 'architecture': bitnet and 'tie_embeddings': true",
        ),
        ({"architecture": "llama", "activation": "relu2"}, "use 'architecture': arcee"),
        ({"architecture": "qwen3", "query_key_norm": False}, "use 'architecture': llama"),
        ({"architecture": "arcee", "activation": "reglu2"}, "use 'architecture': llama"),
        (
            {"architecture": "bitnet", "tie_embeddings": False},
            "'tie_embeddings' is true in 'architecture': bitnet",
        ),
        ({"architecture": "bitnet", "head_dim": 4}, "'head_dim' is width / heads"),
        ({"architecture": "llama", "experts": 3}, "remove 'architecture': no preset has it"),
        ({"architecture": "llama", "sliding_window": 4}, "'sliding_window' is null"),
        ({"architecture": "llama", "causal": False}, "'causal' is true"),
        (
            {"architecture": "llama", "embedding_scale_rule": "correlation"},
            "'embedding_scale_rule' is residual",
        ),
        ({"rotary_factors": (1.0, 2.0)}, "head_dim / 2 = 4 numbers"),
        ({"rotary_factors": (1.0, 2.0, 0.0, 1.0)}, "numbers greater than 0"),
        ({"rotary_scaling": 0.0}, "rotary_scaling"),
        ({"group_size": "tensor"}, "'group_size': tensor needs 'scale_rule': frozen"),
        ({"inner_gains": True}, "'inner_gains' has no effect because norms have gains only"),
        (
            {"inner_gains": True, "learned_norms": True, "sub_norms": False},
            "'inner_gains' has no effect",
        ),
        ({"stored_eps": True, "sub_norms": False}, "'stored_eps' has no effect"),
    ],
)
def test_contradictions_are_refused_with_the_nearest_choice(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError) as error:  # the words are compared below
        DecoderConfig(**{**SMALL, **options})
    assert says in str(error.value)
