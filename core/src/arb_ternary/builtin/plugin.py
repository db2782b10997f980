"""What the core itself provides, registered through the same hooks as anyone else's plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arb_ternary import hookimpl
from arb_ternary.specs import (
    BackendSpec,
    CheckSpec,
    CommandSpec,
    DataSpec,
    ExporterSpec,
    MaskingSpec,
    ModelSpec,
    OptimizerSpec,
    PhaseSpec,
    RecipeSpec,
    TrackerSpec,
)

ARB_API_VERSION = (1, 3)


@hookimpl
def arb_plugin_info() -> Mapping[str, str]:
    return {"summary": "the torch backend, sign votes, AdamW, the decoder, the standard phase and the commands of arb"}


@hookimpl
def arb_register_backends() -> Sequence[BackendSpec]:
    return (
        BackendSpec(
            name="torch",
            target="arb_ternary.backends.reference:build",
            probe="arb_ternary.backends.reference_probe:probe",
            priority=0,
            devices=("cpu", "cuda", "mps"),
            summary="reference kernels in torch, right everywhere",
        ),
    )


@hookimpl
def arb_register_optimizers() -> Sequence[OptimizerSpec]:
    return (
        OptimizerSpec(
            name="scaled_votes",
            target="arb_ternary.optim.scaled_votes:build",
            config="arb_ternary.optim.scaled_votes:ScaledVotesConfig",
            accepts=frozenset({"ternary"}),
            summary="votes as large as the gradient, rounded stochastically; the default",
        ),
        OptimizerSpec(
            name="sign_votes",
            target="arb_ternary.optim.sign_votes:build",
            config="arb_ternary.optim.sign_votes:SignVotesConfig",
            accepts=frozenset({"ternary"}),
            summary="votes in 8-bit accumulators; a full accumulator flips a trit",
        ),
        OptimizerSpec(
            name="split",
            target="arb_ternary.optim.split:build",
            config="arb_ternary.optim.split:SplitConfig",
            accepts=frozenset({"ternary", "float", "stored"}),
            summary="one optimizer for ternary modules and one for float parameters",
        ),
        OptimizerSpec(
            name="adamw",
            target="arb_ternary.optim.adamw:build",
            config="arb_ternary.optim.adamw:AdamWConfig",
            accepts=frozenset({"float"}),
            summary="torch's AdamW, for float parameters",
        ),
    )


@hookimpl
def arb_register_masking() -> Sequence[MaskingSpec]:
    return (
        MaskingSpec(
            name="causal",
            target="arb_ternary.data.masking:build_causal",
            summary="every position predicts the token that follows it",
        ),
    )


@hookimpl
def arb_register_phases() -> Sequence[PhaseSpec]:
    return (
        PhaseSpec(
            name="standard",
            target="arb_ternary.run.standard:build",
            config="arb_ternary.run.standard:StandardConfig",
            summary="end-to-end training or fine-tuning for a number of steps",
        ),
    )


@hookimpl
def arb_register_models() -> Sequence[ModelSpec]:
    return (
        ModelSpec(
            name="decoder",
            target="arb_ternary.models.decoder:build",
            config="arb_ternary.models.decoder:DecoderConfig",
            summary="decoder transformer of ternary linears, embeddings and norms",
        ),
    )


@hookimpl
def arb_register_datasets() -> Sequence[DataSpec]:
    return (
        DataSpec(
            name="shakespeare",
            target="arb_ternary.data.shakespeare:build",
            config="arb_ternary.data.shakespeare:ShakespeareConfig",
            summary="the plays and poems of Shakespeare, part of the package",
        ),
        DataSpec(
            name="text",
            target="arb_ternary.data.files:build",
            config="arb_ternary.data.files:TextConfig",
            summary="a text file, or the text files of a folder",
        ),
        DataSpec(
            name="tokens",
            target="arb_ternary.data.memmap:build",
            config="arb_ternary.data.memmap:TokensConfig",
            summary="token ids in .bin or .npy files, memory-mapped",
        ),
    )


@hookimpl
def arb_register_trackers() -> Sequence[TrackerSpec]:
    return (
        TrackerSpec(
            name="csv",
            target="arb_ternary.run.trackers:build_csv",
            config="arb_ternary.run.trackers:CsvConfig",
            summary="metrics of every step in a CSV file",
        ),
    )


@hookimpl
def arb_register_exporters() -> Sequence[ExporterSpec]:
    return (
        ExporterSpec(
            name="safetensors",
            target="arb_ternary.run.export:build_safetensors",
            suffix=".safetensors",
            summary="packed weights in one safetensors file",
        ),
    )


@hookimpl
def arb_register_checks() -> Sequence[CheckSpec]:
    return (
        CheckSpec(
            name="pure",
            target="arb_ternary.run.checks:build_pure",
            summary="every weight of the model is ternary",
        ),
        CheckSpec(
            name="validation_loss",
            target="arb_ternary.run.checks:build_validation_loss",
            config="arb_ternary.run.checks:ValidationLossConfig",
            summary="the validation loss is at most a maximum",
        ),
    )


@hookimpl
def arb_register_recipes() -> Sequence[RecipeSpec]:
    return (
        RecipeSpec(
            name="float32",
            target="arb_ternary.run.quality.recipes:float32",
            summary="every part in float32, trained by AdamW",
        ),
        RecipeSpec(
            name="scaled_votes",
            target="arb_ternary.run.quality.recipes:scaled_votes",
            summary="the default rule: votes as large as the gradient, rounded stochastically",
        ),
        RecipeSpec(
            name="scaled_votes_reset",
            target="arb_ternary.run.quality.recipes:scaled_votes_reset",
            summary="the default rule without the carry: an accumulator starts again after a flip",
        ),
        RecipeSpec(
            name="scaled_votes_exact",
            target="arb_ternary.run.quality.recipes:scaled_votes_exact",
            summary="the default rule in integers alone: int8 gradients, votes by shifts",
        ),
        RecipeSpec(
            name="scaled_votes_4bit",
            target="arb_ternary.run.quality.recipes:scaled_votes_4bit",
            summary="the default rule with 4-bit accumulators",
        ),
        RecipeSpec(
            name="scaled_votes_2bit",
            target="arb_ternary.run.quality.recipes:scaled_votes_2bit",
            summary="the default rule with no accumulator",
        ),
        RecipeSpec(
            name="scaled_votes_pure",
            target="arb_ternary.run.quality.recipes:scaled_votes_pure",
            summary="the default rule for embedding and head too, with no float parameter",
        ),
        RecipeSpec(
            name="sign_votes_3",
            target="arb_ternary.run.quality.recipes:sign_votes_3",
            summary="sign votes, three of them to a flip at full rate",
        ),
        RecipeSpec(
            name="sign_votes_8",
            target="arb_ternary.run.quality.recipes:sign_votes_8",
            summary="sign votes, eight of them to a flip at full rate",
        ),
        RecipeSpec(
            name="sign_votes_32",
            target="arb_ternary.run.quality.recipes:sign_votes_32",
            summary="sign votes, thirty-two of them to a flip at full rate",
        ),
    )


@hookimpl
def arb_register_commands() -> Sequence[CommandSpec]:
    return (
        CommandSpec(name="train", target="arb_ternary.cli.train:train", summary="Run a config's phases."),
        CommandSpec(name="eval", target="arb_ternary.cli.evaluate:evaluate", summary="Measure a run's model."),
        CommandSpec(name="generate", target="arb_ternary.cli.generate:generate", summary="Continue a prompt."),
        CommandSpec(
            name="export", target="arb_ternary.cli.export:export", summary="Write a run's model in another form."
        ),
        CommandSpec(name="plot", target="arb_ternary.cli.plot:plot", summary="Draw the curves of runs."),
        CommandSpec(name="bench", target="arb_ternary.cli.bench:bench", summary="Measure configs and rules."),
        CommandSpec(
            name="config",
            target="arb_ternary.cli.config_commands:config",
            summary="Write, check and explain config files.",
        ),
        CommandSpec(
            name="plugins",
            target="arb_ternary.cli.plugins_commands:plugins",
            summary="List, inspect, check and write plugins.",
        ),
        CommandSpec(
            name="backends",
            target="arb_ternary.cli.backends_commands:backends",
            summary="List the kernel backends and explain the choice.",
        ),
        CommandSpec(
            name="doctor", target="arb_ternary.cli.doctor:doctor", summary="Say what works here and what does not."
        ),
    )
