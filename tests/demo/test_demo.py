"""The README's demo, shortened, learns below the bigram entropy in a pure model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from arb_ternary.cli.main import main
from arb_ternary.config.fields import to_plain
from arb_ternary_bench.studies.sample import by_llama_cpp, by_run
from arb_ternary_train.loading import load_config
from arb_ternary_train.runner import RunRequest, train

DEMO = Path(__file__).parents[2] / "docs" / "examples"


# A shorter run needs a higher rate: fewer votes are cast before the schedule ends.
SHORT = [
    "phases.0.steps=150",
    "phases.0.warmup_steps=10",
    "phases.0.eval_every=1000",
    "checkpoint.every=1000",
    "optimizer.lr=0.3",
]

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
        ],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_short_demo_is_pure_and_beats_bigrams(device: str, tmp_path: Path) -> None:
    loaded = load_config(DEMO / "demo.yaml", [*SHORT, f"device={device}"])
    report = train(loaded.config, RunRequest(directory=tmp_path / "run"))
    assert report.audit.pure
    assert (report.audit.float_parameters, report.audit.float_buffers) == (0, 0)
    assert report.validation_loss < report.baselines["bigram_entropy"]
    # Windows of the whole text; the last one is shorter.
    assert report.baselines["bigram_entropy"] == pytest.approx(2.4486, abs=2e-3)
    assert (
        json.loads((tmp_path / "run" / "result.json").read_text())["validation_loss"]
        == report.validation_loss
    )
    if device == "cpu":
        writes_in_llama_cpp_what_it_writes_here(tmp_path)


def writes_in_llama_cpp_what_it_writes_here(folder: Path) -> None:
    """Check that llama.cpp writes the same bytes from a float file and reads ternary blocks."""
    pytest.importorskip("xllamacpp")
    for kind in ("f32", "auto"):
        export = [
            "export",
            str(folder / "run"),
            str(folder / f"{kind}.gguf"),
            "--format",
            "gguf",
            "--type",
            kind,
        ]
        assert main(export) == 0
    wanted = by_run(folder / "run", "MACBETH.", 60)
    written = by_llama_cpp(folder / "f32.gguf", "MACBETH.", max_tokens=60, temperature=0)
    assert written == wanted
    assert by_llama_cpp(folder / "auto.gguf", "MACBETH.", max_tokens=60, seed=0)


@pytest.mark.parametrize(
    "other", ["plain.yaml", "vectors.yaml", "float-ends.yaml", "float32.yaml", "bitnet.yaml"]
)
def test_baselines_have_the_demos_shape_data_and_tokens(other: str) -> None:
    """Rates and their schedules may differ: each is tuned."""
    ternary, compared = (to_plain(load_config(DEMO / name).config) for name in ("demo.yaml", other))
    for key in ("data", "masking", "seed"):
        assert ternary[key] == compared[key]
    for key in ("width", "layers", "heads", "feed_forward", "architecture", "max_length"):
        assert ternary["model"][key] == compared["model"][key]
    for key in ("steps", "batch_size", "block_size", "warmup_steps"):
        assert ternary["phases"][0][key] == compared["phases"][0][key]
