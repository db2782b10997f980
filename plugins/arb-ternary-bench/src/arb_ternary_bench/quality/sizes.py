"""The sizes of the quality bench, and the config that all recipes of a size start from."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from attrs import frozen

#: Samples in a batch, predictions in a sample, and so the tokens of an optimizer step.
BATCH: Final = 16
BLOCK: Final = 128
STEP_TOKENS: Final = BATCH * BLOCK

#: Seed of the tuning runs; the study's own seeds count from 0.
TUNING_SEED: Final = 1000

#: Points of the loss curve between the first step and the last.
_CURVE: Final = 20


@frozen(kw_only=True)
class QualitySize:
    """A size of the bench.

    Attributes:
        name: what ``--size`` calls it.
        width, layers, heads, feed_forward: of the decoder.
        tokens: that each seed of a recipe trains on.
        tuning_tokens: that each trial trains on.
        amp: whether matrices are multiplied in bfloat16, which is slower on a processor without
            instructions for it.
        eval_batches: of a point of the loss curve.
    """

    name: str
    width: int
    layers: int
    heads: int
    feed_forward: int
    tokens: int
    tuning_tokens: int
    amp: bool = True
    eval_batches: int = 16


#: About 1.1 million linear weights, 4.1 million, and one that a test can wait for.
SIZES: Final[Mapping[str, QualitySize]] = MappingProxyType(
    {
        size.name: size
        for size in (
            QualitySize(
                name="small",
                width=192,
                layers=3,
                heads=3,
                feed_forward=384,
                tokens=5 << 20,
                tuning_tokens=1 << 20,
            ),
            QualitySize(
                name="medium",
                width=320,
                layers=4,
                heads=5,
                feed_forward=640,
                tokens=8 << 20,
                tuning_tokens=1 << 20,
            ),
            QualitySize(
                name="tiny",
                width=64,
                layers=2,
                heads=2,
                feed_forward=128,
                tokens=1 << 16,
                tuning_tokens=1 << 15,
                amp=False,
                eval_batches=1,
            ),
        )
    }
)


def base_config(
    size: QualitySize, *, name: str, steps: int, seed: int, tuning: bool
) -> dict[str, Any]:
    """The config that recipes change, all but the optimizer, with ``phase`` for its one phase.

    Args:
        size: decides the model.
        name: of the run.
        steps: optimizer steps of :data:`STEP_TOKENS` tokens each.
        seed: of the run.
        tuning: hold out the end of the training text, and leave the validation text alone.
    """
    return {
        "name": name,
        "seed": seed,
        "data": {"name": "shakespeare", "tokenizer": "bytes", "tuning": tuning},
        "model": {
            "name": "decoder",
            "width": size.width,
            "layers": size.layers,
            "heads": size.heads,
            "feed_forward": size.feed_forward,
            "activation": "swiglu",
            "query_key_norm": True,
            "max_length": BLOCK,
            "group_size": "row",
            "scale_rule": "frozen",
            "float_parts": ["embedding", "head"],
        },
        "phase": {
            "name": "standard",
            "steps": steps,
            "batch_size": BATCH,
            "block_size": BLOCK,
            "lr_schedule": "cosine",
            "warmup_steps": min(100, steps // 10),
            "grad_clip": 1.0,
            **({"use_amp": True, "amp_dtype": "bfloat16"} if size.amp else {}),
            "log_every": max(1, steps // 10),
            # A trial is judged by its last loss alone.
            "eval_every": steps if tuning else max(1, steps // _CURVE),
            "eval_batches": size.eval_batches,
        },
        "checkpoint": {"every": max(1, steps // 10), "keep": 2},
    }
