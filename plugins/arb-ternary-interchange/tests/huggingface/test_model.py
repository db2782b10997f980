"""Model folders as sources of an import: their content, and folders that are refused."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import safetensors.torch
import torch
from huggingface_hub import constants

from arb_ternary.errors import DataError, EnvironmentProblem
from arb_ternary.plugins.discovery import install_command
from arb_ternary_interchange.decoder.published import ScaledTrits
from arb_ternary_interchange.huggingface.folder import fetched, model_folder
from arb_ternary_interchange.huggingface.importer import HfImporter
from arb_ternary_interchange.huggingface.model import HfModel
from arb_ternary_interchange.options import ImportConfig
from arb_ternary_text.models.decoder import Decoder

Make = Callable[..., Decoder]
Export = Callable[..., Path]

TENSOR = {"group_size": "tensor", "scale_rule": "frozen"}
QUERY = "model.layers.0.self_attn.q_proj.weight"
NAME = "blocks.0.attention.query"


@pytest.fixture
def change(tmp_path: Path, make_decoder: Make, export: Export) -> Callable[..., Path]:
    """Write a packed folder with some tensors and config keys replaced; None removes them."""
    folder = export(
        make_decoder(architecture="llama", **TENSOR),
        tmp_path / "model",
        {"kind": "bytes"},
        layout="packed",
    )

    def changed(tensors: dict[str, Any] | None = None, **config: Any) -> Path:
        found = safetensors.torch.load_file(folder / "model.safetensors")
        kept = {
            name: tensor
            for name, tensor in {**found, **(tensors or {})}.items()
            if tensor is not None
        }
        safetensors.torch.save_file(kept, folder / "model.safetensors")
        values = {**json.loads((folder / "config.json").read_text()), **config}
        (folder / "config.json").write_text(
            json.dumps({key: v for key, v in values.items() if v is not None})
        )
        return folder

    return changed


def test_packed_trits_are_read_with_the_scale_of_either_class(change: Callable[..., Path]) -> None:
    model = HfModel(change({f"{QUERY}_scale": torch.tensor([4.0])}))
    found = model.read(NAME)
    assert isinstance(found, ScaledTrits)
    assert (found.trits.dtype, tuple(found.trits.shape), found.group_size) == (
        torch.int8,
        (64, 64),
        64,
    )
    assert found.scale.tolist() == [0.25]
    multiplies = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
    found = HfModel(change(quantization_config=multiplies)).read(NAME)
    assert isinstance(found, ScaledTrits)
    assert found.scale.tolist() == [4.0]


def test_dense_bitnet_weights_are_scaled_or_made_ternary(
    change: Callable[..., Path],
) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    offline = {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "modules_to_not_convert": ["lm_head"],
    }
    folder = change(
        {QUERY: weight, f"{QUERY}_scale": torch.tensor([4.0])}, quantization_config=offline
    )
    assert torch.equal(HfModel(folder).read(NAME), 4 * weight)
    folder = change({QUERY: 0.5 * weight.sign()})
    found = HfModel(folder).read(NAME)
    assert isinstance(found, ScaledTrits)
    assert found.scale.tolist() == [2.0]
    skipped = {**offline, "modules_to_not_convert": ["q_proj", "lm_head"]}
    assert torch.equal(
        HfModel(change({QUERY: weight}, quantization_config=skipped)).read(NAME), weight
    )
    online = {**offline, "quantization_mode": "online"}
    found = HfModel(change(quantization_config=online)).read(NAME)
    assert isinstance(found, ScaledTrits)
    assert found.scale.tolist() == pytest.approx([float(weight.abs().mean())])


def test_half_precision_stays_until_it_is_needed(change: Callable[..., Path]) -> None:
    folder = change(
        {
            "model.embed_tokens.weight": torch.randn(256, 64).bfloat16(),
            "model.norm.weight": torch.rand(64).half(),
            "lm_head.weight": torch.randn(256, 64).double(),
            "lm_head.weight_scale": None,
        }
    )
    model = HfModel(folder)
    dtypes = {name: model.read(name).dtype for name in ("embedding", "final_norm", "head")}
    assert dtypes == {
        "embedding": torch.bfloat16,
        "final_norm": torch.float32,
        "head": torch.float32,
    }


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({QUERY: None}, {}, f"the tensor '{QUERY}' of a llama is missing"),
        ({"lm_head.weight": None}, {}, "the tensor 'lm_head.weight' of a llama is missing"),
        ({}, {"num_hidden_layers": 3}, "'num_hidden_layers' is 3, and there is no tensor"),
        ({}, {"hidden_size": 128}, r"is [256, 64], and"),
        (
            {},
            {"intermediate_size": 92},
            "92, 64] trits packed along the rows, four per byte, are [23, 64]",
        ),
        ({}, {"vocab_size": 512}, "is [256, 64], and"),
        ({}, {"quantization_config": None}, "is uint8: only linears are packed"),
        ({f"{QUERY}_scale": None}, {}, "of packed trits, is missing"),
        ({f"{QUERY}_scale": torch.ones(2)}, {}, "must be one float number, not F32 [2]"),
        (
            {f"{QUERY}_scale": torch.ones(1, dtype=torch.int32)},
            {},
            "must be one float number, not I32 [1]",
        ),
        ({QUERY: torch.zeros(64, 64, dtype=torch.int8)}, {}, "is I8; weights are F64, F32"),
        (
            {"model.norm.weight": torch.zeros(64, dtype=torch.uint8)},
            {},
            "is uint8: only linears are packed",
        ),
        ({"model.norm.weight": torch.zeros(63)}, {}, "is [63], and"),
    ],
)
def test_tensors_that_contradict_the_config_are_errors(
    change: Callable[..., Path], tensors: Any, config: Any, message: str
) -> None:
    with pytest.raises(DataError) as caught:
        HfModel(change(tensors, **config))
    assert message in caught.value.what


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {QUERY: torch.full((16, 64), 255, dtype=torch.uint8)},
            f"{QUERY!r}: the code of row 0, column 0 is 3",
        ),
        ({f"{QUERY}_scale": torch.zeros(1)}, "0.0 is not a scale"),
        ({f"{QUERY}_scale": torch.tensor([torch.nan])}, "nan is not a scale"),
        ({f"{QUERY}_scale": -torch.ones(1)}, "-1.0 is not a scale"),
        ({QUERY: torch.full((64, 64), torch.inf)}, "holds numbers that are not finite"),
    ],
)
def test_impossible_values_are_errors(
    change: Callable[..., Path], tensors: Any, message: str
) -> None:
    model = HfModel(change(tensors))
    with pytest.raises(DataError) as caught:
        model.read(NAME)
    assert message in caught.value.what


def test_biases_without_a_place_must_be_zero(
    tmp_path: Path, make_decoder: Make, export: Export
) -> None:
    model = make_decoder(architecture="qwen3", query_key_value_bias=True)
    folder = export(model, tmp_path / "out", layout="dense")
    published = HfModel(folder)
    published.check_values()
    assert published.unmapped == ()
    assert "blocks.1.attention.biases.value" in published.names()
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.o_proj.bias"][3] = 1
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        DataError,
        match=r"o_proj\.bias' is not zero: of the decoder's linears only query, key and value",
    ):
        HfModel(folder).check_values()


def test_what_is_left_out_is_noted(change: Callable[..., Path]) -> None:
    folder = change(
        {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)},
        auto_map={"AutoConfig": "x.Y"},
    )
    assert HfModel(folder).unmapped == (
        "The folder's own code ('auto_map') is not used: the decoder's is.",
        "Tensors that a llama does not use: model.layers.0.self_attn.rotary_emb.inv_freq.",
    )


def test_inspect_describes_a_folder_without_reading_weights(change: Callable[..., Path]) -> None:
    # Codes of 3, which an inspection does not look at.
    folder = change({QUERY: torch.full((16, 64), 255, dtype=torch.uint8)})
    told = HfImporter(ImportConfig()).inspect(folder)
    assert json.loads(json.dumps(told)) == told
    linears = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64) + 256 * 64
    others = 256 * 64 + 5 * 64 + 15
    assert told["parameters"] == linears + others
    assert told["bits_per_weight"] == pytest.approx(
        (2 * linears + 32 * others) / (linears + others), abs=1e-3
    )
    assert (told["format"], told["architecture"], told["vocabulary_size"]) == ("hf", "llama", 256)
    assert (told["tokenizer"], told["unmapped"]) == ("bytes", [])
    assert told["scales"] == "one per matrix, divided by (bitlinear)"
    assert {"name": QUERY, "shape": [16, 64], "type": "U8", "bytes": 1024} in told["tensors"]


def test_folders_and_the_hubs_cache_are_recognised(
    tmp_path: Path, change: Callable[..., Path]
) -> None:
    importer = HfImporter(ImportConfig())
    folder = change()
    assert importer.recognises(folder)
    assert not importer.recognises(folder / "config.json")
    assert not importer.recognises(tmp_path / "none")
    assert not importer.recognises(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100000)
    assert not importer.recognises(tmp_path)
    (tmp_path / "config.json").unlink()

    cached = tmp_path / "models--org--name"
    (cached / "snapshots").mkdir(parents=True)
    with pytest.raises(DataError, match="has 0 snapshots"):
        model_folder(cached)
    (cached / "snapshots" / "abc").symlink_to(folder)
    assert model_folder(cached) == cached / "snapshots" / "abc"
    assert importer.recognises(cached)
    assert importer.inspect(cached)["architecture"] == "llama"
    (cached / "snapshots" / "def").symlink_to(folder)
    with pytest.raises(DataError, match="has 2 snapshots with a config"):
        model_folder(cached)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("def")
    assert model_folder(cached) == cached / "snapshots" / "def"


def test_addresses_of_the_hub_are_looked_up_in_its_cache(
    tmp_path: Path, change: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        DataError, match="hf://org/name: is not in the hub's cache, and the hub cannot be reached"
    ):
        fetched("hf://org/name")
    revision = "a" * 40
    snapshot = tmp_path / "models--org--name" / "snapshots" / revision
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(change())
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text(revision)
    assert fetched("hf://org/name") == snapshot
    assert HfImporter(ImportConfig()).fetch(f"hf://org/name@{revision}") == snapshot
    for wrong in ("hf://name", "hf://a/b/c", "hf://../x", "https://a/b"):
        with pytest.raises(DataError, match=r"must be hf://org/name|cannot be fetched"):
            fetched(wrong)


def no_address(*arguments: object, **options: object) -> NoReturn:
    raise socket.gaierror(-2, "Name or service not known")


@pytest.mark.parametrize("why", ["offline", "unreachable"])
def test_a_cached_model_is_read_without_a_network(
    why: str,
    tmp_path: Path,
    change: Callable[..., Path],
    cached: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    if why == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        monkeypatch.setattr(socket, "getaddrinfo", no_address)
    with pytest.raises(
        DataError, match="hf://org/name: is not in the hub's cache, and the hub cannot be reached"
    ):
        fetched("hf://org/name")
    folder = change()
    snapshot = cached(folder, tmp_path / "hub")
    assert fetched("hf://org/name") == snapshot
    assert (snapshot / "model.safetensors").is_symlink()
    found = HfModel(snapshot).read(NAME)
    wanted = HfModel(folder).read(NAME)
    assert isinstance(found, ScaledTrits)
    assert isinstance(wanted, ScaledTrits)
    assert torch.equal(found.trits, wanted.trits)
    assert HfImporter(ImportConfig()).load(snapshot).attachments["tokenizer"] == {"kind": "bytes"}
    (snapshot / "model.safetensors").resolve().unlink()  # as a download that was cut off
    with pytest.raises(DataError, match=r"has neither model\.safetensors nor"):
        HfModel(fetched("hf://org/name"))


def test_the_hubs_library_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(EnvironmentProblem, match="needs the package huggingface_hub") as caught:
        fetched("hf://org/name")
    assert install_command("arb-ternary-interchange[hub]") in caught.value.hint
