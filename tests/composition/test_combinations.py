"""Components that do not go together, and options without effect, are config errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from arb_ternary.config.errors import show_path
from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary.errors import ConfigError
from arb_ternary_train.loading import load_config

FLOATS: Final = ["embedding", "head", "norms", "linears"]
SPLIT = {"name": "split"}
DEPTH = {"name": "progressive", "target_stacks": 3, "steps_per_stack": 1}
INPUT = {**DEPTH, "time_interpretation": "input"}
TIMED = {"name": "time_step"}


def validated(folder: Path, **sections: Any) -> None:
    model = {"name": "decoder", "width": 16, "layers": 1, "heads": 2, "max_length": 8}
    phase = {"name": "standard", "steps": 2, "batch_size": 2, "block_size": 8}
    config = {
        "data": {"name": "shakespeare"},
        "optimizer": {"name": "scaled_votes"},
        **sections,
        "model": {**model, **sections.get("model", {})},
        "phases": [{**phase, **sections.get("phase", {})}],
    }
    if "phase" in sections:
        if sections["phase"].get("name") == "progressive":
            config["phases"][0].pop("steps")
        config.pop("phase")
    (folder / "run.yaml").write_text(dump_yaml(config))
    load_config(folder / "run.yaml")


def said(error: ConfigError, path: str) -> str:
    """Return the message of the only fault, which must be at ``path``."""
    assert [show_path(fault.path) for fault in error.faults] == [path], str(error)
    return str(error.faults[0].message)


#: Config, path of the fault, and part of its message.
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a cell beyond the accumulators": (
        {"model": {"vote_bits": 4}, "optimizer": {"name": "scaled_votes", "cell": 100}},
        "optimizer.cell",
        "100 does not fit accumulators of 4 bits, which hold up to 7",
    ),
    "votes of the tail of an exact model": (
        {"exact": True, "optimizer": {"name": "scaled_votes", "tail": True}},
        "optimizer.tail",
        "does not go with gradients int8",
    ),
    "orthogonalised gradients of an exact run": (
        {"exact": True, "optimizer": {"name": "scaled_votes", "orthogonal": True}},
        "optimizer.orthogonal",
        "true does not go with exact: true",
    ),
    "clipped gradients of an exact run": (
        {"exact": True, "optimizer": {"name": "scaled_votes", "spectral_clip": True}},
        "optimizer.spectral_clip",
        "true does not go with exact: true",
    ),
    "two ways to change a gradient": (
        {"optimizer": {"name": "scaled_votes", "orthogonal": True, "spectral_clip": True}},
        "optimizer.spectral_clip",
        "true does not go with orthogonal: true",
    ),
    "votes of the tail of three levels": (
        {"optimizer": {"name": "scaled_votes", "tail": True, "vote_levels": 3}},
        "optimizer.tail",
        "true does not go with vote_levels",
    ),
    "votes of three levels of steps that are put off": (
        {"optimizer": {"name": "gqc.gnts", "inner": {"name": "scaled_votes", "vote_levels": 3}}},
        "optimizer.inner.vote_levels",
        "cannot be combined with gqc.gnts, which puts steps off",
    ),
    "a threshold beyond the accumulators": (
        {"model": {"vote_bits": 2}, "optimizer": {"name": "sign_votes", "accum_threshold": 2}},
        "optimizer.accum_threshold",
        "2 does not fit accumulators of 2 bits",
    ),
    "a momentum in two bits": (
        {"model": {"vote_bits": 2}, "optimizer": {"name": "momentum_votes"}},
        "optimizer",
        "accumulators of 8 or 4",
    ),
    "quanta beyond the accumulators": (
        {"model": {"vote_bits": 4}, "optimizer": {"name": "momentum_votes", "quanta": 9}},
        "optimizer.quanta",
        "9 does",
    ),
    "an optimizer of floats for trits": (
        {"optimizer": "adamw"},
        "optimizer",
        "cannot train ternary modules",
    ),
    "an optimizer of trits for floats": (
        {"model": {"float_parts": ["norms"]}},
        "optimizer",
        "cannot train float parameters",
    ),
    "trits and floats in a wrapper": (
        {
            "model": {"float_parts": ["norms"]},
            "optimizer": {"name": "gqc.gnts", "inner": "sign_votes"},
        },
        "optimizer.inner",
        "cannot train float parameters",
    ),
    "a split of a pure model": (
        {"optimizer": SPLIT},
        "optimizer.float",
        "the model has no float parts",
    ),
    "a split of a float model": (
        {"model": {"float_parts": FLOATS}, "optimizer": SPLIT},
        "optimizer.ternary",
        "the model has no ternary parts",
    ),
    "clipping beside a part that puts steps off": (
        {
            "model": {"float_parts": ["head"]},
            "optimizer": {"name": "split", "float": {"name": "gqc.gnts", "inner": "adamw"}},
            "phase": {"grad_clip": 1.0},
        },
        "phases[0].grad_clip",
        "clipping would act on a partial sum",
    ),
    "clipping of a part of a sum": (
        {
            "model": {"float_parts": ["norms"]},
            "optimizer": {"name": "gqc.gnts", "inner": "split"},
            "phase": {"grad_clip": 1.0},
        },
        "phases[0].grad_clip",
        "clipping would act on a partial sum",
    ),
    "a maximum of votes": (
        {"optimizer": {"name": "signgsd", "maximize": True}},
        "optimizer.maximize",
        "cannot maximize it",
    ),
    "more decay than votes": (
        {"optimizer": {"name": "signgsd", "weight_decay": 128.0}},
        "optimizer.weight_decay",
        "at most 127",
    ),
    "a block beyond the context": (
        {"phase": {"block_size": 9}},
        "phases[0].block_size",
        "max_length is 8",
    ),
    "float16 of votes": (
        {"device": "cuda", "phase": {"use_amp": True, "amp_dtype": "float16"}},
        "phases[0].amp_dtype",
        "votes are cast",
    ),
    "float16 without a loss scale": (
        {"phase": {"use_amp": True, "amp_dtype": "float16"}},
        "phases[0].amp_dtype",
        "works on cuda, not on cpu",
    ),
    "float16 on a cpu": (
        {"phase": {"dtype": "float16"}},
        "phases[0].dtype",
        "does not work on cpu",
    ),
    "state of a model that sees the future": (
        {"model": {"causal": False}, "phase": {"preserve_state": True}},
        "phases[0].preserve_state",
        "not causal",
    ),
    "growth of another model": (
        {
            "model": {"name": "bitnet", "float_parts": FLOATS},
            "optimizer": "adamw",
            "phase": DEPTH,
            "masking": "mlm",
        },
        "phases[0]",
        "stacks are made of the blocks of model decoder",
    ),
    "growth to what is there": (
        {"phase": {**DEPTH, "target_stacks": 1, "train_first": False}},
        "phases[0].target_stacks",
        "nothing to train",
    ),
    "an odd sinusoid": (
        {"phase": {**INPUT, "time_embedding_dim": 7}},
        "phases[0].time_embedding_dim",
        "must be even",
    ),
    "adapters of some stacks": (
        {
            "optimizer": SPLIT,
            "phase": {
                **DEPTH,
                "qlora_enabled": True,
                "qlora_strategy": "variable",
                "qlora_configs": {0: {"rank": 2, "alpha": 1.0}, 2: {"rank": 2, "alpha": 1.0}},
            },
        },
        "phases[0].qlora_configs",
        "has no entry for stack 1",
    ),
    "float adapters for an optimizer of trits": (
        {"phase": {**DEPTH, "qlora_enabled": True}},
        "optimizer",
        "cannot train float parameters",
    ),
    "float stacks for an optimizer of trits": (
        {"phase": {**DEPTH, "new_stack_precision": "full"}},
        "optimizer",
        "cannot train float parameters",
    ),
    "two numbers of time steps": (
        {"masking": TIMED, "phase": {**DEPTH, "num_time_steps": 16}},
        "phases[0].num_time_steps",
        "hides by 8",
    ),
    "a time for each sample that nobody draws": (
        {"masking": TIMED, "phase": {**INPUT, "time_sampling": "sample"}},
        "phases[0].time_sampling",
        "draws none",
    ),
    "raw token files without a dtype": (
        {"data": {"name": "tokens", "train": "x.bin", "vocabulary_size": 9}},
        "data.dtype",
        "must be given",
    ),
}

#: Config, and the path of the option without effect.
IDLE: dict[str, tuple[dict[str, Any], str]] = {
    **{
        f"{key} of a pure model": ({"phase": {key: value}}, f"phases[0].{key}")
        for key, value in {"lr": 0.1, "min_lr": 0.01, "grad_clip": 1.0}.items()
    },
    "min_rate of a float model with min_lr": (
        {
            "model": {"float_parts": FLOATS},
            "optimizer": "adamw",
            "phase": {"min_lr": 0.01, "min_rate": 0.1},
        },
        "phases[0].min_rate",
    ),
    "min_rate of a constant schedule": (
        {"phase": {"lr_schedule": "constant", "min_rate": 0.1}},
        "phases[0].min_rate",
    ),
    **{
        f"group_size of {what}": (
            {"model": {"group_size": 32, **options}, "optimizer": optimizer, **more},
            "model.group_size",
        )
        for what, options, optimizer, more in (
            ("a float model", {"float_parts": FLOATS}, "adamw", {}),
            ("a float model that grows", {"float_parts": FLOATS}, "adamw", {"phase": DEPTH}),
            ("a ternary embedding", {"float_parts": ["head", "linears"]}, SPLIT, {}),
            ("bitnet", {"name": "bitnet", "float_parts": FLOATS}, "adamw", {}),
        )
    },
    **{
        f"learned_norms of a {model} with float norms": (
            {
                "model": {"name": model, "float_parts": parts, "learned_norms": True},
                "optimizer": optimizer,
            },
            "model.learned_norms",
        )
        for model, parts, optimizer in (
            ("decoder", ["norms"], SPLIT),
            ("bitnet", ["norms", "linears", "head", "embedding"], "adamw"),
        )
    },
    "amp_dtype without use_amp": ({"phase": {"amp_dtype": "float16"}}, "phases[0].amp_dtype"),
    "pin_memory on a cpu": ({"phase": {"pin_memory": True}}, "phases[0].pin_memory"),
    "lr of signgsd": ({"optimizer": {"name": "signgsd", "lr": 0.1}}, "optimizer.lr"),
    "lr of signgsd in the ternary part": (
        {
            "model": {"float_parts": ["head"]},
            "optimizer": {"name": "split", "ternary": {"name": "signgsd", "lr": 0.1}},
        },
        "optimizer.ternary.lr",
    ),
    "votes of signgsd in a float model": (
        {"model": {"float_parts": FLOATS}, "optimizer": {"name": "signgsd", "votes": {"band": 1}}},
        "optimizer.votes.band",
    ),
    "band without learned exponents": (
        {
            "model": {"scale_rule": "frozen", "embedding_scale_rule": "frozen"},
            "optimizer": {"name": "scaled_votes", "band": 1},
        },
        "optimizer.band",
    ),
    "clip of votes of the tail": (
        {"model": {"vote_bits": 4}, "optimizer": {"name": "scaled_votes", "clip": 2.0}},
        "optimizer.clip",
    ),
    "leak of two bits": (
        {"model": {"vote_bits": 2}, "optimizer": {"name": "scaled_votes", "leak": 0.1}},
        "optimizer.leak",
    ),
    "power without a schedule": (
        {
            "optimizer": {"name": "momentum_votes", "power": 0.5},
            "phase": {"lr_schedule": "constant"},
        },
        "optimizer.power",
    ),
    "gnr of votes": ({"optimizer": {"name": "gqc.gnr", "inner": "sign_votes"}}, "optimizer"),
    "a warm-up of no batches": (
        {
            "optimizer": {
                "name": "gqc.gnts",
                "inner": "sign_votes",
                "schedule": {"batches": 3, "warmup_start": 2.0},
            },
        },
        "optimizer.schedule.warmup_start",
    ),
    "decay of gains": (
        {
            "model": {"float_parts": ["norms"]},
            "optimizer": {"name": "split", "float": {"name": "adamw", "weight_decay": 0.1}},
        },
        "optimizer.float.weight_decay",
    ),
    **{
        f"{key} of growth": ({"phase": {**DEPTH, key: value}}, f"phases[0].{key}")
        for key, value in {
            "time_per_stack": 2,
            "time_embedding_dim": 8,
            "time_encoding_type": "learned",
            "time_sampling": "sample",
            "qlora_base": "ternary",
            "qlora_rank": 2,
            "qlora_alpha": 2.0,
            "qlora_strategy": "progressive",
            "adapter_dtype": "ternary",
            "progressive_qlora_rank": 2,
            "progressive_qlora_alpha": 2.0,
        }.items()
    },
    **{
        f"{key} of adapters that are all the same": (
            {"optimizer": SPLIT, "phase": {**DEPTH, "qlora_enabled": True, key: "linear"}},
            f"phases[0].{key}",
        )
        for key in ("qlora_rank_pattern", "qlora_alpha_pattern")
    },
    "a mapping of time as input": (
        {"masking": TIMED, "phase": {**INPUT, "stack_time_mapping": "exponential"}},
        "phases[0].stack_time_mapping",
    ),
    "a mapping that gives the same steps": (
        {
            "masking": TIMED,
            "phase": {**DEPTH, "target_stacks": 2, "stack_time_mapping": "exponential"},
        },
        "phases[0].stack_time_mapping",
    ),
    "a cache beside a trunk that learns": (
        {
            "optimizer": SPLIT,
            "phase": {
                **DEPTH,
                "qlora_enabled": True,
                "trunk_strategy": "qlora",
                "cache_dtype": "int8",
            },
        },
        "phases[0].cache_dtype",
    ),
    "the folder of no cache": (
        {"phase": {**DEPTH, "cache_activations": False, "cache_folder": "x"}},
        "phases[0].cache_folder",
    ),
    "a mapping of the masking": (
        {"masking": {**TIMED, "stack_time_mapping": "exponential"}, "phase": DEPTH},
        "masking.stack_time_mapping",
    ),
    "drawing of times that follow from depth": (
        {"masking": {**TIMED, "time_sampling": "sample"}},
        "masking.time_sampling",
    ),
    "drawing of times that the phase gives": (
        {
            "masking": {**TIMED, "time_interpretation": "input", "time_sampling": "sample"},
            "phase": DEPTH,
        },
        "masking.time_sampling",
    ),
    "a start of what does not grow": (
        {"masking": {"name": "progressive", "start": 0.2}},
        "masking.start",
    ),
    "batches of no evaluation": (
        {"phase": {"eval_every": 0, "eval_batches": 4}},
        "phases[0].eval_batches",
    ),
    "a schedule of two stacks": (
        {
            "masking": {"name": "progressive", "schedule": "cosine"},
            "phase": {**DEPTH, "target_stacks": 2},
        },
        "masking.schedule",
    ),
    "a dtype of .npy files": (
        {"data": {"name": "tokens", "train": "x.npy", "vocabulary_size": 9, "dtype": "uint8"}},
        "data.dtype",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_run_would_refuse_is_a_fault_of_the_config(case: str, tmp_path: Path) -> None:
    sections, path, message = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        validated(tmp_path, **sections)
    assert message in said(caught.value, path)


@pytest.mark.parametrize("case", IDLE)
def test_an_option_that_does_nothing_is_a_fault_that_says_why(case: str, tmp_path: Path) -> None:
    sections, path = IDLE[case]
    with pytest.raises(ConfigError) as caught:
        validated(tmp_path, **sections)
    assert "has no effect because" in said(caught.value, path)


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"embedding_scale_rule": "correlation"}},
        {"model": {"embedding_scale_rule": "correlation"}, "optimizer": "momentum_votes"},
        {
            "model": {"float_parts": ["norms"]},
            "optimizer": SPLIT,
            "phase": {"lr": 0.01, "grad_clip": 1.0},
        },
        {"optimizer": SPLIT, "phase": {**DEPTH, "qlora_enabled": True, "trunk_strategy": "qlora"}},
        {
            "model": {"float_parts": FLOATS, "group_size": 32},
            "optimizer": SPLIT,
            "phase": {**DEPTH, "new_stack_precision": "ternary"},
        },
        {
            "model": {"float_parts": ["head"], "learned_norms": True, "group_size": 32},
            "optimizer": SPLIT,
        },
        {"masking": {"name": "progressive", "schedule": "cosine", "start": 0.2}, "phase": DEPTH},
        {
            "optimizer": {"name": "gqc.gnts", "inner": {"name": "split"}},
            "model": {"float_parts": ["head"]},
        },
        {
            "model": {"vote_bits": 4},
            "optimizer": {"name": "scaled_votes", "cell": 7, "tail": False, "clip": 2.0},
        },
        {
            "model": {"vote_bits": 4},
            "optimizer": {"name": "scaled_votes", "vote_levels": 3, "clip": 2.0},
        },
    ],
)
def test_what_goes_together_is_no_fault(sections: dict[str, Any], tmp_path: Path) -> None:
    validated(tmp_path, **sections)


def test_a_model_whose_linears_are_made_ternary_does_not_grow(tmp_path: Path) -> None:
    model = {
        "name": "decoder",
        "width": 16,
        "layers": 1,
        "heads": 2,
        "max_length": 8,
        "float_parts": FLOATS,
    }
    config = {
        "data": "shakespeare",
        "model": {"name": "bitnet_of", "model": model},
        "optimizer": "adamw",
        "phases": [{**DEPTH, "block_size": 8}],
    }
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    with pytest.raises(ConfigError) as refused:
        load_config(tmp_path / "run.yaml")
    assert said(refused.value, "model").startswith("phase 'progressive' adds parts to the model")
