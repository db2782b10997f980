"""The commands on folders of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from huggingface_hub import constants

from arb_ternary.cli.main import main
from arb_ternary_text.models.decoder import Decoder


def test_a_folder_becomes_a_run_and_goes_out_again(
    tmp_path: Path,
    make_decoder: Callable[..., Decoder],
    export: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_decoder(architecture="bitnet", group_size="tensor", scale_rule="frozen")
    first = export(model, tmp_path / "first", {"kind": "bytes"}, layout="packed")
    run, second = str(tmp_path / "run"), tmp_path / "second"

    assert main(["inspect", str(first), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["format"], told["architecture"], told["tokenizer"]) == ("hf", "bitnet", "bytes")
    assert main(["import", str(first), run]) == 0
    assert main(["export", run, str(second), "--format", "hf", "--layout", "packed"]) == 0
    before, after = (safetensors.torch.load_file(folder / "model.safetensors") for folder in (first, second))
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (second / name).read_bytes() == (first / name).read_bytes()

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    capsys.readouterr()
    assert main(["import", "hf://org/name", str(tmp_path / "none")]) == 1
    assert "hf://org/name: is not in the hub's cache" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
