"""The config of a run: the top level of every file that ``arb train`` reads."""

from __future__ import annotations

import re
from typing import Any, Literal

import attrs
from attrs import frozen
from attrs.validators import in_

from arb_ternary.config.choice import (
    Choice,
    DataChoice,
    MaskingChoice,
    ModelChoice,
    OptimizerChoice,
    PhaseChoice,
)
from arb_ternary.config.options import (
    LARGEST_INT64,
    Rule,
    default_choice,
    non_negative,
    option,
    positive,
)
from arb_ternary.specs import CheckSpec, TrackerSpec
from arb_ternary_train.openmp import MAX_THREADS
from arb_ternary_train.requirements import parse_requirement

_NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_DEVICE_PATTERN = r"cpu|cuda(:\d+)?|mps"

# The name becomes a directory.
is_run_name = Rule(
    "letters, digits, '.', '_' and '-', beginning with a letter or digit",
    lambda value: re.fullmatch(_NAME_PATTERN, value) is not None,
    {"pattern": f"^(?:{_NAME_PATTERN})$"},
)
is_device = Rule(
    "cpu, cuda, cuda:N or mps",
    lambda value: re.fullmatch(_DEVICE_PATTERN, value) is not None,
    {"pattern": f"^(?:{_DEVICE_PATTERN})$"},
)
_is_thread_count = Rule(
    f"from 1 to {MAX_THREADS}, or auto",
    lambda value: value == "auto" or 1 <= value <= MAX_THREADS,
    {"minimum": 1, "maximum": MAX_THREADS},
)
_is_not_empty = Rule("a list of at least one item", lambda value: len(value) > 0, {"minItems": 1})


def _are_requirements(
    instance: Any, attribute: attrs.Attribute[Any], value: tuple[str, ...]
) -> None:
    for text in value:
        parse_requirement(text)


@frozen(kw_only=True)
class CheckpointConfig:
    """Options of checkpoints."""

    every: int = option(
        200,
        "optimizer steps between checkpoints; 0 = never, at the end of a phase neither: only when "
        "the run is stopped",
        validator=non_negative,
    )
    keep: int = option(3, "how many of the newest checkpoints are kept", validator=positive)


@frozen(kw_only=True)
class RanksConfig:
    """Options of several processes that share a model; without effect in one process."""

    weights: Literal["replicated", "sharded"] = option(
        "replicated",
        "sums of votes: replicated = every rank has those of all rows and sends them once per "
        "step, sharded = each keeps those of its own rows and sends the others after every "
        "micro-batch (FSDP); packed weights are on every rank",
        validator=in_(("replicated", "sharded")),
    )
    optimizer_state: Literal["replicated", "sharded"] = option(
        "replicated",
        "moments of adamw: replicated = every rank has all of them, sharded = each keeps a slice "
        "of every parameter's",
        validator=in_(("replicated", "sharded")),
    )
    checkpoints: Literal["whole", "pieces"] = option(
        "whole",
        "how a model is saved: whole = rank 0 writes all of it into one file, pieces = each rank "
        "writes the rows that it owns, to a disk that all machines see",
        validator=in_(("whole", "pieces")),
    )
    ordered_sums: bool = option(
        True,
        "add gradients of float parameters in the order of micro-batches, which gives the bytes of "
        "one process; false = in one all-reduce per step, which sends less and gives others",
    )


@frozen(kw_only=True)
class RunConfig:
    """Everything that decides a run. Plugins take part only because components are named here."""

    name: str = option("run", "name of the run and of its directory", validator=is_run_name)
    seed: int = option(0, "seed of all randomness", validator=non_negative, largest=LARGEST_INT64)
    device: str = option(
        "cpu", "where the model lives: cpu, cuda, cuda:N or mps", validator=is_device
    )
    backend: str = option(
        "auto", "kernel backend: auto, a name, or names in order of preference (triton,torch)"
    )
    exact: bool = option(
        False,
        "int8 activations and gradients, so that every ternary product is an integer: the same "
        "bits on every backend",
    )
    deterministic: bool = option(
        False,
        "torch's deterministic algorithms, and kernels chosen by fixed tables whatever was "
        "measured here",
    )
    threads: int | Literal["auto"] = option(
        "auto",
        "threads of the processor, for every operation; auto = OMP_NUM_THREADS if it is set, else "
        "the number that the model has work for and that is fastest in a few timed passes (with "
        "deterministic: "
        "by size alone)",
        validator=_is_thread_count,
    )
    requires: tuple[str, ...] = option(
        (),
        "distributions that must be installed, such as arb-ternary-signgsd>=0.1",
        validator=_are_requirements,
    )
    plugins: tuple[str, ...] = option((), "plugin files to load, relative to the config's folder")
    data: DataChoice = option(help="where text or tokens come from")
    model: ModelChoice = option(help="the network")
    masking: MaskingChoice = default_choice(
        "causal", "how samples become inputs, targets and a loss mask"
    )
    optimizer: OptimizerChoice = option(help="how the model learns")
    phases: tuple[PhaseChoice, ...] = option(
        help="the stretches of the run, in order", validator=_is_not_empty
    )
    trackers: tuple[Choice[TrackerSpec], ...] = option((), "observers of the run")
    checks: tuple[Choice[CheckSpec], ...] = option((), "checks that pass or fail the finished run")
    ranks: RanksConfig = option(help="what several processes share among them", factory=RanksConfig)
    checkpoint: CheckpointConfig = option(
        help="when checkpoints are written", factory=CheckpointConfig
    )
