"""Two ranks write the files of one process, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.config.yaml_document import dump_yaml
from arb_ternary_train.metrics import read_metrics

Compare = Callable[[Path, Path], None]
RULE = {"name": "sign_votes", "accum_threshold": 2, "e_accum_threshold": 2}
SCALED = {"name": "scaled_votes", "exponent_rate": 0.5}
MOMENTUM = {"name": "momentum_votes", "exponent_rate": 0.5}


def with_floats(rule: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": "split", "ternary": dict(rule), "float": "adamw"}


def config_of(
    text: Path,
    *,
    optimizer: Any = RULE,
    n: int = 4,
    steps: int = 20,
    export: bool = False,
    more: Any = (),
    clip: float | None = None,
    tuned: Any = (),
    **model: Any,
) -> str:
    """Return the config of a run of ``steps`` steps of ``n`` micro-batches."""
    shape = {"width": 16, "layers": 1, "heads": 2, "max_length": 8, "group_size": 32}
    phase = {
        "name": "standard",
        "steps": steps,
        "batch_size": 2,
        "block_size": 8,
        "eval_every": 7,
        "eval_batches": 3,
        "gradient_accumulation_steps": n,
        "grad_clip": clip,
        **dict(tuned),
    }
    phases: list[dict[str, Any]] = [phase]
    if export:
        phases += [{"name": "export", "exporter": "safetensors"}, phase]
    return dump_yaml(
        {
            "name": "same",
            "data": {"name": "text", "path": str(text), "tokenizer": "characters"},
            "model": {"name": "decoder", **shape, **model},
            "optimizer": optimizer,
            "threads": 1,
            "deterministic": True,
            "checkpoint": {"every": 8, "keep": 5},
            "phases": phases,
            **dict(more),
        }
    )


#: Runs, and what is different about each.
CASES: dict[str, dict[str, Any]] = {
    "8-bit votes and float parts": {
        "optimizer": with_floats(RULE),
        "float_parts": ["norms", "embedding", "head"],
    },
    "4-bit votes": {"vote_bits": 4, "n": 3},
    "2-bit votes": {
        "vote_bits": 2,
        "optimizer": {"name": "sign_votes", "accum_threshold": 1, "e_accum_threshold": 1},
    },
    "exact": {"more": {"exact": True}},
    "scaled votes": {"optimizer": SCALED},
    "scaled votes of three levels": {"optimizer": {**SCALED, "vote_levels": 3}},
    "orthogonalised gradients": {"optimizer": {**SCALED, "orthogonal": True}},
    "clipped gradients": {"optimizer": {**SCALED, "spectral_clip": True}},
    "momentum votes": {"optimizer": MOMENTUM},
    "tied head": {"tie_embeddings": True},
    "experts": {"n": 2, "experts": 3, "experts_per_token": 1},
    "sharded sums and moments": {
        "optimizer": with_floats(SCALED),
        "float_parts": ["norms", "embedding"],
        "n": 3,
        "more": {"ranks": {"weights": "sharded", "optimizer_state": "sharded"}},
    },
    "clipped float parts": {
        "optimizer": with_floats(SCALED),
        "float_parts": ["norms"],
        "clip": 0.1,
    },
    "a phase on rank 0 alone": {"export": True},
    "parts that are frozen or learn more slowly": {
        "optimizer": with_floats(SCALED),
        "float_parts": ["norms", "head"],
        "steps": 10,
        "export": True,
        "tuned": {
            "freeze": ["embedding", "*.query"],
            "rate_factors": {"*.attention": 0.5, "head": 0.25},
        },
        "more": {"ranks": {"optimizer_state": "sharded"}},
    },
}
#: Runs in `make test`.
NORMAL = {
    "8-bit votes and float parts",
    "experts",
    "sharded sums and moments",
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=() if name in NORMAL else pytest.mark.slow, id=name)
        for name in CASES
    ],
)
def test_two_ranks_write_the_files_of_one_process(
    ranks: Any, text: Path, same_files: Compare, case: str
) -> None:
    write_and_compare(ranks, text, same_files, case, CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [name for name, made in CASES.items() if "ranks" not in made.get("more", {})],
)
def test_ranks_with_sharded_sums_write_them_too(
    ranks: Any, text: Path, same_files: Compare, case: str
) -> None:
    made = CASES[case]
    more = {**made.get("more", {}), "ranks": {"weights": "sharded"}}
    write_and_compare(ranks, text, same_files, f"sharded {case}", {**made, "more": more})


def write_and_compare(
    ranks: Any, text: Path, same_files: Compare, name: str, options: dict[str, Any]
) -> None:
    config = ranks.folder / "same.yaml"
    config.write_text(config_of(text, **options))
    places = [ranks.folder / f"{name} {size}" for size in (1, 2)]
    for size, place in enumerate(places, start=1):
        ranks.must(config, place, size=size)
    same_files(*places)
    steps = [line for line in read_metrics(places[0] / "metrics.jsonl") if line["event"] == "train"]
    assert sum(line["flips"] for line in steps) > 0
    assert sum(line["exponent_moves"] for line in steps) > 0
