"""Registers the components and commands of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType

from arb_ternary import hookimpl
from arb_ternary.specs import (
    CheckSpec,
    CommandSpec,
    DocumentSpec,
    OptimizerSpec,
    PhaseSpec,
)
from arb_ternary_train import hookspecs
from arb_ternary_train.launcher import VARIABLES as LAUNCHER_VARIABLES
from arb_ternary_train.openmp import VARIABLES

ARB_API_VERSION = (1, 0)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {"summary": "runs: the standard phase, AdamW, checkpoints, evaluation"}


@hookimpl
def arb_register_hooks() -> Sequence[ModuleType]:
    return (hookspecs,)


@hookimpl
def arb_register_optimizers() -> Sequence[OptimizerSpec]:
    return (
        OptimizerSpec(
            name="split",
            target="arb_ternary_train.optim.split:build",
            config="arb_ternary_train.optim.config:SplitConfig",
            accepts=frozenset({"ternary", "float"}),
            summary="one optimizer for ternary modules and one for float parameters",
        ),
        OptimizerSpec(
            name="adamw",
            target="arb_ternary_train.optim.adamw:build",
            config="arb_ternary_train.optim.config:AdamWConfig",
            accepts=frozenset({"float"}),
            summary="torch's AdamW, for float parameters",
        ),
    )


@hookimpl
def arb_register_phases() -> Sequence[PhaseSpec]:
    return (
        PhaseSpec(
            name="standard",
            target="arb_ternary_train.standard:build",
            config="arb_ternary_train.options:StandardConfig",
            variables=VARIABLES,
            summary="end-to-end training or fine-tuning for a number of steps",
        ),
    )


@hookimpl
def arb_register_checks() -> Sequence[CheckSpec]:
    return (
        CheckSpec(
            name="pure",
            target="arb_ternary_train.checks:build_pure",
            summary="every weight of the model is ternary",
        ),
        CheckSpec(
            name="validation_loss",
            target="arb_ternary_train.checks:build_validation_loss",
            config="arb_ternary_train.checks:ValidationLossConfig",
            summary="the validation loss is at most a maximum",
        ),
    )


@hookimpl
def arb_register_documents() -> Sequence[DocumentSpec]:
    return (
        DocumentSpec(
            name="run",
            target="arb_ternary_train.loading:load_config",
            config="arb_ternary_train.config:RunConfig",
            command="arb train",
            resolve="arb_ternary_train.auto_rate:resolve_loaded",
            summary="everything that decides a run",
        ),
    )


@hookimpl
def arb_register_commands() -> Sequence[CommandSpec]:
    return (
        CommandSpec(
            name="train",
            target="arb_ternary_train.cli.train:train",
            variables=LAUNCHER_VARIABLES,
            summary="Run a config's phases.",
        ),
        CommandSpec(
            name="eval",
            target="arb_ternary_train.cli.evaluate:evaluate",
            summary="Measure a run's model.",
        ),
        CommandSpec(
            name="generate",
            target="arb_ternary_train.cli.generate:generate",
            summary="Draw from a model.",
        ),
        CommandSpec(
            name="plot",
            target="arb_ternary_train.cli.plot:plot",
            summary="Draw the curves of runs.",
        ),
        CommandSpec(
            name="report",
            target="arb_ternary_train.cli.report:report",
            summary="Write a page about runs.",
        ),
    )
