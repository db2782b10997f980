"""The config of a run that upcycles a teacher from its first phase to its last."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from attrs import frozen

from arb_ternary.config.errors import Faulty
from arb_ternary.errors import ConfigError
from arb_ternary_upcycle.recipe.outline import TeacherOutline
from arb_ternary_upcycle.recipe.phases import VOTES, ending, preparing
from arb_ternary_upcycle.recipe.student import decoupled_options, student_section


@frozen(kw_only=True)
class Preset:
    """How long a run trains, and what it measures at the end.

    Attributes:
        blockwise_steps: steps of each block.
        steps: steps of the whole student.
        block_size: tokens of a sample.
        measure: see the phase ``benchmark``.
    """

    blockwise_steps: int
    steps: int
    block_size: int
    measure: tuple[str, ...]


#: ``quick``: whether it works at all. ``paper``: figures to keep.
PRESETS: Final[Mapping[str, Preset]] = MappingProxyType(
    {
        "quick": Preset(blockwise_steps=50, steps=100, block_size=512, measure=("perplexity",)),
        "paper": Preset(
            blockwise_steps=500,
            steps=2000,
            block_size=2048,
            measure=("perplexity", "latency", "memory"),
        ),
    }
)
#: Rates of float parameters in the phases ``blockwise``, which trains gains, and ``global``.
_BLOCKWISE_RATE: Final = 1e-3
_GLOBAL_RATE: Final = 5e-5
#: Default lengths of a prompt and of what follows it in the phase ``benchmark``.
_PROMPT: Final = 128
_ANSWER: Final = 32


@frozen(kw_only=True)
class UpcycleOptions:
    """Options of ``arb upcycle``. None = the preset's, or what fits the teacher."""

    preset: Literal["quick", "paper"] = "quick"
    attention: Literal["keep", "dba"] = "keep"
    sem_dim: int | None = None
    geo_dim: int | None = None
    policy: str | None = None
    blockwise_steps: int | None = None
    steps: int | None = None
    batch_size: int = 1
    block_size: int | None = None
    data: str | None = None
    tokenizer: str | None = None
    device: str = "cpu"
    seed: int = 0


def run_config(outline: TeacherOutline, options: UpcycleOptions, folder: Path) -> dict[str, Any]:
    """Return settings for ``arb train``.

    The teacher's tokenizer is written into ``folder`` if the data need it.

    Raises:
        ConfigError: the teacher's attention cannot be split as asked.
        DataError: no tokenizer came with the teacher, and none is named.
    """
    model = _model(outline, options)
    longest = outline.config.max_length
    projection = {} if options.policy is None else {"policy": options.policy}
    return {
        "name": "upcycle",
        "seed": options.seed,
        "device": options.device,
        "data": _data(outline, options, folder),
        "model": model,
        "optimizer": {"name": "split", "ternary": dict(VOTES), "float": {"name": "adamw"}},
        "phases": [
            *preparing(outline.source, model, longest, {"projection": projection}),
            *_training(options, longest),
            *ending(_benchmark(PRESETS[options.preset], longest), None),
        ],
        "checkpoint": {"every": 50, "keep": 2},
    }


def _model(outline: TeacherOutline, options: UpcycleOptions) -> dict[str, Any]:
    own: dict[str, Any] = {}
    if options.attention == "dba":
        own = decoupled_options(outline.config, options.sem_dim, options.geo_dim)
    try:
        return student_section(outline.config, own)
    except Faulty as error:
        fault = error.faults[0]
        raise ConfigError(f"{outline.source}: {fault.message}", fault.hint) from error


def _training(options: UpcycleOptions, longest: int) -> list[dict[str, Any]]:
    """Return the phases that train; one without steps is left out."""
    preset = PRESETS[options.preset]
    loop = {
        "batch_size": options.batch_size,
        "block_size": options.block_size or min(preset.block_size, longest),
        "grad_clip": 1.0,
        "min_lr": 0.0,
    }
    blockwise = {
        "name": "blockwise",
        "steps": _given(options.blockwise_steps, preset.blockwise_steps),
        **loop,
        "lr": _BLOCKWISE_RATE,
        "eval_every": 0,
    }
    whole = {
        "name": "global",
        "steps": _given(options.steps, preset.steps),
        **loop,
        "lr": _GLOBAL_RATE,
        "kd_weight": 1.0,
        "force": True,
    }
    return [phase for phase in (blockwise, whole) if phase["steps"]]


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _benchmark(preset: Preset, longest: int) -> dict[str, Any]:
    """Return the options of ``benchmark``, with lengths that fit into the context."""
    options: dict[str, Any] = {"measure": list(preset.measure)}
    if "latency" in preset.measure and longest < _PROMPT + _ANSWER:
        prompt = longest // 2
        options["prompt_lengths"] = [prompt]
        options["generation_lengths"] = [min(_ANSWER, longest - prompt)]
    return options


def _data(outline: TeacherOutline, options: UpcycleOptions, folder: Path) -> dict[str, Any]:
    if options.tokenizer is None:
        return outline.data_in(folder, path=options.data)
    if options.data is None:
        return {"name": "shakespeare", "tokenizer": options.tokenizer}
    return {"name": "text", "path": options.data, "tokenizer": options.tokenizer}
