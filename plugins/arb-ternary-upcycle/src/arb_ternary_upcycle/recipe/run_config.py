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
    """How long a run takes: steps of each block and of the whole, tokens of a sample, what is
    measured then.
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
#: Rates of float parameters, by blocks and of the whole.
_BLOCKWISE_RATE: Final = 1e-4
_GLOBAL_RATE: Final = 5e-5
#: Tokens of a prompt, and of what follows it, in the phase ``benchmark``.
_PROMPT = 128
_ANSWER = 32


@frozen(kw_only=True)
class UpcycleOptions:
    """What a person may ask for without a config. None = the preset's, or what fits the teacher."""

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
    """Settings of ``arb train``. The teacher's tokenizer goes into ``folder`` where the data need
    it.

    Raises:
        ConfigError: the teacher's attention cannot be split so.
        DataError: no tokenizer came with the teacher, and none is named.
    """
    preset = PRESETS[options.preset]
    own: dict[str, Any] = {}
    if options.attention == "dba":
        own = decoupled_options(outline.config, options.sem_dim, options.geo_dim)
    try:
        model = student_section(outline.config, own)
    except Faulty as error:
        raise ConfigError(
            f"{outline.source}: {error.faults[0].message}", error.faults[0].hint
        ) from error
    longest = outline.config.max_length
    size = min(preset.block_size, longest) if options.block_size is None else options.block_size
    loop = {"batch_size": options.batch_size, "block_size": size, "grad_clip": 1.0}
    blockwise = (
        preset.blockwise_steps if options.blockwise_steps is None else options.blockwise_steps
    )
    steps = preset.steps if options.steps is None else options.steps
    training: list[dict[str, Any]] = []
    if blockwise:
        training.append(
            {
                "name": "blockwise",
                "steps": blockwise,
                **loop,
                "lr": _BLOCKWISE_RATE,
                "min_lr": 0.0,
                "eval_every": 0,
            }
        )
    if steps:
        training.append(
            {
                "name": "global",
                "steps": steps,
                **loop,
                "lr": _GLOBAL_RATE,
                "min_lr": 0.0,
                "kd_weight": 1.0,
            }
            | {"force": True}
        )
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
            *training,
            *ending(_benchmark(preset, longest), None),
        ],
        "checkpoint": {"every": 50, "keep": 2},
    }


def _benchmark(preset: Preset, longest: int) -> dict[str, Any]:
    """Options of the phase, with a prompt and an answer that fit into a context of ``longest``
    tokens.
    """
    options: dict[str, Any] = {"measure": list(preset.measure)}
    if "latency" in preset.measure and longest < _PROMPT + _ANSWER:
        options |= {
            "prompt_lengths": [longest // 2],
            "generation_lengths": [min(_ANSWER, longest - longest // 2)],
        }
    return options


def _data(outline: TeacherOutline, options: UpcycleOptions, folder: Path) -> dict[str, Any]:
    if options.tokenizer is None:
        return outline.data_in(folder, path=options.data)
    text = (
        {"name": "shakespeare"} if options.data is None else {"name": "text", "path": options.data}
    )
    return {**text, "tokenizer": options.tokenizer}
