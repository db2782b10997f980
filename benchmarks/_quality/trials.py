"""The runs of ``quality.py``: sizes, the base config, and the config of every run."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Final, Literal

from attrs import frozen

from _quality.recipes import Recipe, merged
from _quality.runs import PlannedRun
from arb_ternary.config.yaml_document import Document
from arb_ternary.errors import ComponentError
from arb_ternary.plugins.manager import manager
from arb_ternary_train.config import RunConfig
from arb_ternary_train.growing_batches import tokens_in
from arb_ternary_train.loading import structure_run

#: Samples in a batch, predictions in a sample, and so the tokens of an optimizer step.
BATCH: Final = 16
BLOCK: Final = 128
STEP_TOKENS: Final = BATCH * BLOCK
#: Seed of the tuning runs; those of final runs count from 0.
TUNING_SEED: Final = 1000
#: Points of the loss curve between the first step and the last.
_CURVE: Final = 20

Stage = Literal["tuning", "final"]


@frozen(kw_only=True)
class QualitySize:
    """A size of the comparison.

    Attributes:
        shape: options of the decoder.
        tokens: that each seed of a recipe trains on.
        tuning_tokens: that each trial trains on.
        amp: whether matrices are multiplied in bfloat16, which is slower on a processor without
            instructions for it.
    """

    shape: Mapping[str, int]
    tokens: int
    tuning_tokens: int = 1 << 20
    amp: bool = True


#: 1.1 million linear weights, 4.1 million, and a size that a test can wait for.
SIZES: Final = {
    "small": QualitySize(
        shape={"width": 192, "layers": 3, "heads": 3, "feed_forward": 384}, tokens=5 << 20
    ),
    "medium": QualitySize(
        shape={"width": 320, "layers": 4, "heads": 5, "feed_forward": 640}, tokens=8 << 20
    ),
    "tiny": QualitySize(
        shape={"width": 64, "layers": 2, "heads": 2, "feed_forward": 128},
        tokens=1 << 16,
        tuning_tokens=1 << 15,
        amp=False,
    ),
}


def base_config(size: QualitySize, *, name: str, steps: int, seed: int, tuning: bool) -> Any:
    """Return the config that recipes change, without an optimizer, with ``phase`` for its phase.

    Args:
        size: decides the model.
        name: of the run.
        steps: optimizer steps of :data:`STEP_TOKENS` tokens each.
        seed: of the run.
        tuning: hold out the end of the training text, and leave the validation text alone.
    """
    phase = {
        "name": "standard",
        "steps": steps,
        "batch_size": BATCH,
        "block_size": BLOCK,
        "lr_schedule": "cosine",
        "warmup_steps": min(100, steps // 10),
        "grad_clip": 1.0,
        "log_every": max(1, steps // 10),
        # A trial is judged by its last loss alone.
        "eval_every": steps if tuning else max(1, steps // _CURVE),
        "eval_batches": 16,
    }
    if size.amp:
        phase |= {"use_amp": True, "amp_dtype": "bfloat16"}
    return {
        "name": name,
        "seed": seed,
        "data": {"name": "shakespeare", "tokenizer": "bytes", "tuning": tuning},
        "model": {
            "name": "decoder",
            **size.shape,
            "activation": "swiglu",
            "query_key_norm": True,
            "max_length": BLOCK,
            "group_size": "row",
            "scale_rule": "frozen",
            "float_parts": ["embedding", "head"],
        },
        "phase": phase,
        "checkpoint": {"every": max(1, steps // 10), "keep": 2},
    }


def plan(
    stage: Stage, size: QualitySize, recipe: Recipe, choice: int, number: int, tokens: int
) -> PlannedRun:
    """Plan one run.

    Args:
        stage: ``tuning`` chooses a recipe's settings, ``final`` measures them.
        size: of the model.
        recipe: how it trains.
        choice: the recipe's trial.
        number: the trial in the stage ``tuning``, the seed in the stage ``final``.
        tokens: that it trains on, rounded down to whole steps.

    Raises:
        ConfigError: a value of the recipe is wrong.
        ComponentError: the recipe trains on another number of tokens.
    """
    tuning = stage == "tuning"
    steps = tokens // STEP_TOKENS
    name = f"{stage}-{recipe.name}-{number}"
    seed = TUNING_SEED if tuning else number
    base = base_config(size, name=name, steps=steps, seed=seed, tuning=tuning)
    settings = recipe.settings(choice, steps)
    config = merged(recipe.config(base, steps), settings)
    config["phases"] = [config.pop("phase")]
    run = PlannedRun(
        name=name,
        config=config,
        tokens=steps * STEP_TOKENS,
        labels={"stage": stage, "rule": recipe.name, "number": number, "settings": settings},
    )
    _check(run, recipe)
    return run


def _check(run: PlannedRun, recipe: Recipe) -> None:
    """Structure the config as a run will, and check that it trains on as many tokens as others."""
    source = f"recipe {recipe.name!r}, {run.name}"
    document = Document(deepcopy(dict(run.config)), source)
    config: RunConfig = structure_run(document, manager().registry).config
    options: Any = config.phases[0].options
    tokens = tokens_in(options, options.steps)
    if tokens != run.tokens:
        raise ComponentError(
            f"{source}: steps x batch_size x block_size x gradient_accumulation_steps, with "
            f"batch_doublings, is {tokens:,} tokens, not {run.tokens:,}",
            "Every recipe trains on the same tokens.",
        )
