"""The content of an exported file, and models that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from arb_ternary.errors import ConfigError
from arb_ternary_interchange.gguf.reader import GgufFile
from arb_ternary_interchange.gguf.tensors import from_interleaved, to_interleaved
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder

Make = Callable[..., Decoder]
Export = Callable[..., Path]


def types(path: Path) -> dict[str, str]:
    return {name: info.type.name for name, info in GgufFile(path).tensors.items()}


def matrices(path: Path) -> set[str]:
    return {info.type.name for info in GgufFile(path).tensors.values() if len(info.shape) == 2}


def test_keys_are_those_that_gguf_py_names(make_decoder: Make, export: Export) -> None:
    options = {
        "head_dim": 32,
        "rotary_base": 5e5,
        "norm_eps": 1e-5,
        "max_length": 99,
        "rotary_scaling": 4.0,
    }
    fields = gguf.GGUFReader(export(make_decoder("llama", **options), "q4_0", name="mine")).fields
    keys = gguf.Keys
    names = {key: field.contents() for key, field in fields.items()}
    arch = "llama"
    assert names[keys.General.ARCHITECTURE] == arch
    assert names[keys.General.NAME] == "mine"
    assert names[keys.General.FILE_TYPE] == 2
    assert names[keys.General.QUANTIZATION_VERSION] == 2
    assert names[keys.LLM.CONTEXT_LENGTH.format(arch=arch)] == 99
    assert names[keys.LLM.EMBEDDING_LENGTH.format(arch=arch)] == 256
    assert names[keys.LLM.BLOCK_COUNT.format(arch=arch)] == 2
    assert names[keys.LLM.FEED_FORWARD_LENGTH.format(arch=arch)] == 512
    assert names[keys.LLM.VOCAB_SIZE.format(arch=arch)] == 256
    assert names[keys.Attention.HEAD_COUNT.format(arch=arch)] == 4
    assert names[keys.Attention.HEAD_COUNT_KV.format(arch=arch)] == 2
    assert names[keys.Attention.KEY_LENGTH.format(arch=arch)] == 32
    assert names[keys.Attention.VALUE_LENGTH.format(arch=arch)] == 32
    assert names[keys.Attention.LAYERNORM_RMS_EPS.format(arch=arch)] == pytest.approx(1e-5)
    assert names[keys.Rope.DIMENSION_COUNT.format(arch=arch)] == 32
    assert names[keys.Rope.FREQ_BASE.format(arch=arch)] == 5e5
    assert names[keys.Rope.SCALING_TYPE.format(arch=arch)] == "linear"
    assert names[keys.Rope.SCALING_FACTOR.format(arch=arch)] == 4
    assert names[keys.Tokenizer.MODEL] == "gpt2"
    assert names[keys.Tokenizer.PRE] == "gpt-2"
    assert names[keys.Tokenizer.EOS_ID] == 0
    assert names[keys.Tokenizer.MERGES] == []


@pytest.mark.parametrize(
    ("kind", "number"),
    [("f32", 0), ("f16", 1), ("bf16", 32), ("tq1_0", 36), ("tq2_0", 37), ("q2_0", 41)],
)
def test_the_file_type_is_that_of_most_weights(
    make_decoder: Make, export: Export, kind: str, number: int
) -> None:
    options = {"float_parts": ("embedding",)} if "q" in kind else {}
    path = export(make_decoder("arcee", **options), kind)
    assert GgufFile(path).metadata["general.file_type"] == number


def test_a_tied_head_is_left_out(make_decoder: Make, export: Export) -> None:
    assert "output.weight" not in types(export(make_decoder("llama", tie_embeddings=True)))
    assert "output.weight" in types(export(make_decoder("llama")))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"TQ2_0"}),
        ({"group_size": "row"}, {"TQ2_0"}),
        ({"width": 128, "heads": 2}, {"TQ2_0", "Q2_0"}),  # down has 512 columns
        ({"width": 96, "heads": 2, "feed_forward": 96}, {"Q4_0"}),
        ({"width": 40, "heads": 2, "feed_forward": 80}, {"F16"}),
    ],
)
def test_auto_takes_the_smallest_type_that_holds_a_matrix(
    make_decoder: Make, export: Export, options: dict[str, Any], expected: set[str]
) -> None:
    assert matrices(export(make_decoder("llama", **options))) == expected


@pytest.mark.parametrize(
    ("group", "expected"), [(256, "TQ2_0"), (128, "Q2_0"), (64, "Q2_0"), (32, "Q4_0")]
)
def test_auto_keeps_exponents_apart(
    make_decoder: Make, export: Export, group: int, expected: str
) -> None:
    model = make_decoder("llama", group_size=group)
    model.blocks[0].attention.query.exponent[3, -1] += 1
    found = types(export(model))
    assert found["blk.0.attn_q.weight"] == ("TQ2_0" if group == 256 else expected)
    assert found["blk.0.attn_k.weight"] == "TQ2_0"


def test_auto_keeps_float_matrices_exact(make_decoder: Make, export: Export) -> None:
    model = make_decoder("llama", float_parts=("embedding", "head", "linears"))
    model.embedding.weight.data.copy_(model.embedding.weight.half())
    model.head.weight.data.copy_(model.head.weight.bfloat16())
    model.head.weight.data[0, 0] = 2.0**100
    path = export(model)
    found = types(path)
    assert (found["token_embd.weight"], found["output.weight"], found["blk.0.attn_q.weight"]) == (
        "F16",
        "BF16",
        "F32",
    )
    file = GgufFile(path)
    stored = file.bytes_of(file.tensors["token_embd.weight"]).view(np.float16)
    np.testing.assert_array_equal(stored, model.embedding.weight.detach().numpy())


FLOATS = ("embedding", "head")


@pytest.mark.parametrize(("kind", "number"), [("f32", 0), ("f16", 1), ("bf16", 32), ("q8_0", 7)])
def test_float_matrices_are_rounded_as_gguf_py_does(
    make_decoder: Make, export: Export, kind: str, number: int
) -> None:
    model = make_decoder("llama", vocabulary_size=4096, float_parts=FLOATS)
    rows = model.embedding.weight.data
    rows[0] = 0.0
    # halves, in the blocks whose largest number is 127
    rows[1] = torch.linspace(-127, 127, rows.shape[1])
    rows[2] = 1.0 + torch.arange(rows.shape[1]) / 2**8  # halves of bfloat16, to even and odd
    path = export(model, "auto", float_kind=kind)
    file = GgufFile(path)
    known = gguf.GGMLQuantizationType[kind.upper()]
    for name, module in (("token_embd.weight", model.embedding), ("output.weight", model.head)):
        stored = np.asarray(file.bytes_of(file.tensors[name])).view(np.uint8).ravel()
        wanted = np.ascontiguousarray(
            gguf.quants.quantize(module.weight.detach().numpy(), known)
        ).view(np.uint8)
        np.testing.assert_array_equal(stored, wanted.ravel())
    assert types(path)["blk.0.attn_q.weight"] == "TQ2_0"
    assert types(path)["output_norm.weight"] == "F32"
    assert file.metadata["general.file_type"] == number


@pytest.mark.parametrize(
    ("kind", "options", "value", "reason"),
    [
        (
            "q8_0",
            {"width": 40, "heads": 2, "feed_forward": 80},
            1.0,
            "Q8_0 stores 32 columns together, and it has 40",
        ),
        ("f16", {}, 65520.0, "F16 ends at 65504, and it has 65520"),
        ("f16", {}, float("nan"), "F16 ends at 65504, and it has nan"),
        ("bf16", {}, 3.4e38, "BF16 ends at 3.3895e[+]38, and it has 3.4e[+]38"),
    ],
)
def test_a_float_type_that_cannot_round_a_matrix_is_refused(
    make_decoder: Make,
    export: Export,
    kind: str,
    options: dict[str, Any],
    value: float,
    reason: str,
) -> None:
    model = make_decoder("llama", float_parts=FLOATS, **options)
    model.embedding.weight.data[0, 0] = value
    with pytest.raises(
        ConfigError, match=f"float_type: {kind} cannot hold token_embd.weight: {reason}"
    ):
        export(model, "auto", float_kind=kind)


REFUSED = [
    (
        "tq2_0",
        {"width": 128, "heads": 2},
        None,
        "token_embd.weight",
        "TQ2_0 stores 256 columns together, and it has",
        "f32, f16, bf16, q2_0, q4_0",
    ),
    (
        "tq1_0",
        {},
        1,
        "blk.0.attn_q.weight",
        "TQ1_0 has one scale for 256 columns, and it has an exponent for 128",
        "f32, f16, bf16, q2_0, q4_0",
    ),
    (
        "q2_0",
        {"group_size": 32},
        1,
        "blk.0.attn_q.weight",
        "Q2_0 has one scale for 64 columns",
        "f32, f16, bf16, q4_0",
    ),
    (
        "tq2_0",
        {},
        40,
        "blk.0.attn_q.weight",
        "it has the exponent 35, and float16 holds 2^-24 to 2^15",
        "f32, bf16",
    ),
    ("f16", {}, -40, "blk.0.attn_q.weight", "it has the exponent -45, and float16", "f32, bf16"),
]


@pytest.mark.parametrize(("kind", "options", "moved", "name", "reason", "others"), REFUSED)
def test_a_type_that_would_round_is_refused(
    make_decoder: Make,
    export: Export,
    kind: str,
    options: dict[str, Any],
    moved: int | None,
    name: str,
    reason: str,
    others: str,
) -> None:
    model = make_decoder("llama", **options)
    if moved is not None:
        exponent = model.blocks[0].attention.query.exponent
        exponent[0, 0] = moved - 5 if abs(moved) > 1 else exponent[0, 0] + moved
    with pytest.raises(ConfigError) as caught:
        export(model, kind)
    assert caught.value.what.startswith(f"type: {kind} cannot hold {name} exactly: {reason}")
    assert f"Types that hold it: {others}." in caught.value.hint


def test_a_float_matrix_in_a_float_type_that_rounds_is_refused(
    make_decoder: Make, export: Export
) -> None:
    with pytest.raises(
        ConfigError,
        match=r"f16 cannot hold token_embd.weight exactly: its numbers need more than F16",
    ):
        export(make_decoder("llama", float_parts=("embedding",)), "f16")


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        (
            "qwen3",
            {"rotary_factors": [1.0] * 32},
            "rotary_factors has no place in llama.cpp's graph of qwen3",
        ),
        (
            "bitnet",
            {"rotary_factors": [1.0] * 32},
            "rotary_factors has no place in llama.cpp's graph of bitnet",
        ),
        (
            "bitnet",
            {"query_key_value_bias": True},
            "query_key_value_bias has no place in llama.cpp's graph of bitnet",
        ),
        ("bitnet", {"activation": "reglu2"}, "activation: reglu2"),
    ],
)
def test_models_unknown_to_llama_cpp_are_refused(
    make_decoder: Make, export: Export, architecture: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        export(make_decoder(architecture, **options))
    assert message in caught.value.what


def test_other_models_are_refused_with_the_nearest_preset(export: Export) -> None:
    with pytest.raises(ConfigError) as caught:
        export(Decoder(DecoderConfig(width=64), 256))
    assert "architecture: " in caught.value.hint
    with pytest.raises(ConfigError, match="a GGUF file holds a decoder, not a Linear"):
        export(torch.nn.Linear(2, 2))


def test_rows_are_interleaved_head_by_head() -> None:
    # Two heads of six features: planes (0, 3), (1, 4), (2, 5) of each stand together in a file.
    assert to_interleaved(12, 2).tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert to_interleaved(12, 2)[from_interleaved(12, 2)].tolist() == list(range(12))


def test_queries_and_keys_are_interleaved_for_llama_only(
    make_decoder: Make, export: Export
) -> None:
    for architecture, interleaved in (
        ("llama", True),
        ("arcee", True),
        ("qwen3", False),
        ("bitnet", False),
    ):
        model = make_decoder(architecture)
        file = GgufFile(export(model, "f32", name=architecture))
        for name, part in (("attn_q", "query"), ("attn_k", "key"), ("attn_v", "value")):
            linear = getattr(model.blocks[0].attention, part)
            heads = linear.out_features // 64
            order = torch.arange(linear.out_features).view(heads, 2, 32).transpose(1, 2).flatten()
            dense = linear.dense_weight()
            wanted = dense[order] if interleaved and part != "value" else dense
            stored = file.bytes_of(file.tensors[f"blk.0.{name}.weight"]).view(np.float32)
            np.testing.assert_array_equal(stored, wanted.numpy())
