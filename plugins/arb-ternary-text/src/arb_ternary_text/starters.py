"""Configs to start from; ``arb config new`` writes them with their options explained."""

from __future__ import annotations

from typing import Any, Final


def _decoder(**changes: Any) -> dict[str, Any]:
    # The architecture is one that llama.cpp and transformers run.
    sizes = {"width": 128, "layers": 4, "heads": 4, "max_length": 128}
    return {"name": "decoder", "architecture": "qwen3", **sizes, **changes}


def _run(name: str, **settings: Any) -> dict[str, Any]:
    phase = {
        "name": "standard",
        "steps": 1000,
        "batch_size": 16,
        "block_size": 128,
        "warmup_steps": 100,
    }
    return {"name": name, "data": {"name": "shakespeare"}, "phases": [phase], **settings}


#: The options with which a model without float parameters learns best: one constant power of two
#: per row, and vectors of trits.
_PURE: Final[dict[str, Any]] = {
    "learned_norms": True,
    "inner_gains": True,
    "row_scales": True,
    "vector_trits": 8,
    "group_size": "row",
    "scale_rule": "frozen",
    "embedding_scale_rule": "frozen",
}

#: A small pure-ternary decoder.
SMALL: Final = _run(
    "small",
    model=_decoder(**_PURE),
    optimizer={"name": "scaled_votes", "orthogonal": True},
    checks=["pure"],
)

#: Ternary linears with float parts, each with an optimizer of its own.
MIXED: Final = _run(
    "mixed",
    model=_decoder(float_parts=["embedding", "head", "norms"]),
    optimizer={
        "name": "split",
        "ternary": {"name": "scaled_votes"},
        "float": {"name": "adamw", "lr": 4e-3},
    },
)

#: ``SMALL`` without orthogonalisation, with the same bits on every backend.
EXACT: Final = _run(
    "exact",
    exact=True,
    model=_decoder(**_PURE),
    optimizer={"name": "scaled_votes"},
    checks=["pure"],
)

#: The same architecture in float32, as a baseline.
FLOAT: Final = _run(
    "float",
    model=_decoder(activations="float", float_parts=["embedding", "head", "norms", "linears"]),
    optimizer={"name": "adamw", "lr": 2e-3},
)
