"""The study of an upcycled model in llama.cpp, on a small Llama of random trits."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train

pytest.importorskip("xllamacpp")
GgufConfig = pytest.importorskip("arb_ternary_interchange.options").GgufConfig
GgufExporter = pytest.importorskip("arb_ternary_interchange.gguf.exporter").GgufExporter
GgufFile = pytest.importorskip("arb_ternary_interchange.gguf.reader").GgufFile

CONFIG = """
name: small
data: {{name: text, path: {folder}/text.txt, tokenizer: bytes}}
model: {{name: decoder, architecture: llama, width: 256, layers: 2, heads: 4, kv_heads: 2,
    feed_forward: 512,
  max_length: 256, group_size: {group}, float_parts: [head]}}
optimizer: {{name: split, ternary: scaled_votes, float: adamw}}
phases: [{{name: standard, steps: 3, batch_size: 4, block_size: 32, eval_every: 0, lr: 0.02}}]
"""


@pytest.fixture(scope="module")
def finish() -> Any:
    path = Path(__file__).parents[1] / "studies" / "finish.py"
    spec = importlib.util.spec_from_file_location("finish", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(folder: Path, group: Any) -> Path:
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    (folder / "run.yaml").write_text(CONFIG.format(folder=folder, group=group))
    request = RunRequest(directory=folder / "run", backend="torch", reporter=Silent)
    train(load_config(folder / "run.yaml").config, request)
    return folder / "run"


@pytest.mark.parametrize(
    ("kind", "group"), [("tq2_0", "row"), pytest.param("q2_0", 64, marks=pytest.mark.slow)]
)
def test_llama_cpp_continues_as_the_model_does(
    finish: Any, tmp_path: Path, kind: str, group: Any
) -> None:
    run = trained(tmp_path, group)
    original = tmp_path / "original.gguf"
    finish.export_run(run, original, "gguf", ["type=f32"])
    arguments = [
        str(run),
        "--original",
        str(original),
        "--type",
        kind,
        "--tokens",
        "8",
        "--repeats",
        "2",
    ]
    code = finish.main(
        [
            *arguments,
            "--context",
            "256",
            "--work",
            str(tmp_path / "w"),
            "--out",
            str(tmp_path / "o"),
        ]
    )
    result = json.loads((tmp_path / "o").read_text())
    assert result["greedy"]["same"]["blocks"] == result["exact"]["same"]["float"] == 20
    assert code == 0
    assert {row["llama.cpp"] for row in result["greedy"]["prompts"]} != {""}
    assert result["files"]["student"]["bytes"] < result["files"]["original"]["bytes"] / 2
    assert result["files"]["small"]["bytes"] < result["files"]["student"]["bytes"]
    assert all(facts["decode"] > 0 for facts in result["files"].values())
    assert result["types"][kind.upper()] == 2 * 7 + 1


def test_blocks_give_the_numbers_of_llama_cpp(finish: Any, tmp_path: Path) -> None:
    """To 1e-5 in two layers, where other roundings are off by 1e-3 and more.

    The embedding is float: sums of trits are whole multiples of one number, and often lie between
    two roundings.
    """
    options: dict[str, Any] = {
        "width": 256,
        "layers": 2,
        "heads": 4,
        "feed_forward": 512,
        "group_size": "row",
    }
    config = DecoderConfig(architecture="llama", float_parts=("embedding",), **options)
    torch.manual_seed(0)
    model = Decoder(config, 256).eval()
    path = tmp_path / "m.gguf"
    GgufExporter(GgufConfig(type="tq2_0")).export(
        model, path, {"name": "m", "tokenizer": {"kind": "bytes"}}
    )
    ids = list(b"Now is the winter of our discontent")
    top = finish.LlamaCpp(path, context=64, threads=1).continued(ids, 1, probabilities=50)["top"]
    apart = {}
    for way in finish.WAYS:
        with finish.computing(model, way, GgufFile(path)), torch.no_grad():
            ours = torch.log_softmax(model(torch.tensor([ids]))[0, -1].double(), dim=-1)
        apart[way] = max(abs(float(ours[token]) - value) for token, value in top.items())
    assert apart["blocks"] < 1e-5
    assert min(apart["int8"], apart["float"]) > 1e-3


def test_blocks_are_rounded_as_llama_cpp_rounds_them(finish: Any) -> None:
    """Its C, number by number: ``quantize_row_q8_K_ref`` and ``quantize_row_q8_0`` of ggml."""
    x = torch.randn(3, 512) * 3
    x[1, :256] = 0
    for rounding, size in ((finish.rounded_q8_k, 256), (finish.rounded_q8_0, 32)):
        found = rounding(x)
        for row, column in ((r, c) for r in range(3) for c in range(0, 512, size)):
            block = x[row, column : column + size].numpy()
            top = block[abs(block).argmax()]
            if top == 0:
                assert not found[row, column : column + size].any()
                continue
            if size == 256:
                inverse = np.float32(-127) / top
                wanted = np.minimum(127, np.rint(block * inverse)) * (np.float32(1) / inverse)
            else:
                scale = abs(top) / np.float32(127)
                wanted = np.rint(block * (np.float32(1) / scale)) * np.float32(np.float16(scale))
            np.testing.assert_allclose(
                found[row, column : column + size].numpy(), wanted, rtol=1e-6, atol=1e-9
            )


def test_where_two_texts_part(finish: Any) -> None:
    assert finish.parting([1, 2, 3], [4, 2, 3]) == 0
    assert finish.parting([1, 2, 3], [1, 4, 3]) == 1
    assert finish.parting([1, 2], [1, 2, 3]) == 2
