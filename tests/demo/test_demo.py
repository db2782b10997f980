"""The README's demo, shortened, learns below the bigram entropy in a pure model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary.cli.main import main
from arb_ternary.config.fields import to_plain
from arb_ternary_text.models.generate import generate
from arb_ternary_train.loading import load_config
from arb_ternary_train.restore import load_run
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

PROMPT = "MACBETH."
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
    xllamacpp = pytest.importorskip("xllamacpp")
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
    wanted = written_by_run(folder / "run")
    assert written_by_llama_cpp(xllamacpp, folder / "f32.gguf", temperature=0) == wanted
    assert written_by_llama_cpp(xllamacpp, folder / "auto.gguf", seed=0)


def written_by_run(run: Path) -> str:
    """Return the run's likeliest bytes after the prompt; activations are not rounded."""
    model: Any = load_run(run).model.eval()
    for module in model.modules():
        if hasattr(module, "activations"):
            module.activations = "float"
    written = generate(
        model, list(PROMPT.encode()), max_new_tokens=60, temperature=0, cache="float"
    )
    return bytes(written).decode(errors="replace")


def written_by_llama_cpp(xllamacpp: Any, path: Path, **options: Any) -> str:
    """Return what llama.cpp writes after the prompt, with keys and values in float32."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx = 256
    parameters.n_parallel = 1
    parameters.cpuparams.n_threads = 1
    parameters.cpuparams_batch.n_threads = 1
    parameters.n_gpu_layers = 0
    parameters.warmup = False
    parameters.fit_params = False
    parameters.cache_ram_mib = 0
    parameters.verbosity = 0
    parameters.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
    parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(parameters)
    answer = server.handle_completions({"prompt": PROMPT, "max_tokens": 60, **options})
    assert "error" not in answer, answer
    return str(answer["choices"][0]["text"])


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
