"""Read exported files back, and files that contradict themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arb_ternary.errors import ConfigError, DataError
from arb_ternary_interchange.decoder.published import ScaledTrits
from arb_ternary_interchange.decoder.weights import TernaryWeight, exported_weights
from arb_ternary_interchange.gguf.blocks import encode_trits
from arb_ternary_interchange.gguf.decoding import read_tensor
from arb_ternary_interchange.gguf.exporter import GgufExporter
from arb_ternary_interchange.gguf.model import GgufModel
from arb_ternary_interchange.gguf.reader import GgufFile
from arb_ternary_interchange.gguf.tensor_types import F32, FORK_Q2_0, Q2_0, TQ2_0, TensorType
from arb_ternary_interchange.gguf.values import Array, Kind, Scalar, Value
from arb_ternary_interchange.gguf.writer import PlannedTensor, write_gguf
from arb_ternary_interchange.options import GgufConfig
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder

Make = Callable[..., Decoder]
Export = Callable[..., Path]


def columns(values: torch.Tensor, group: int, count: int) -> torch.Tensor:
    """Return one number for each of ``count`` columns, from one for each group."""
    return values.repeat_interleave(group, dim=1)[:, :count]


@settings(max_examples=40, deadline=None)
@given(
    architecture=st.sampled_from(["llama", "qwen3", "arcee", "bitnet"]),
    kind=st.sampled_from(["auto", "tq1_0", "tq2_0", "q2_0", "q4_0"]),
    group=st.sampled_from([32, 64, 128, 256, "row"]),
    width=st.sampled_from([64, 96, 128, 256]),
    hidden=st.sampled_from([64, 160, 256, 512]),
    seed=st.integers(0, 2**16),
)
def test_every_trit_and_exponent_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    architecture: str,
    kind: str,
    group: int | str,
    width: int,
    hidden: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    config = DecoderConfig(
        architecture=architecture,
        width=width,
        layers=1,
        heads=2,
        feed_forward=hidden,
        group_size=group,
    )
    model = Decoder(config, 256)
    for name, buffer in model.named_buffers():
        if name.endswith(".exponent"):
            buffer.copy_(torch.randint(-24, 16, buffer.shape, generator=generator))
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    try:
        GgufExporter(GgufConfig(type=kind)).export(
            model, path, {"name": "m", "tokenizer": {"kind": "bytes"}}
        )
    except ConfigError as error:
        if kind == "auto" or "exactly" not in error.what:
            raise
        return
    published = GgufModel(GgufFile(path))
    for name, weight in exported_weights(model):
        found = published.read(name)
        if not isinstance(weight, TernaryWeight):
            assert isinstance(found, torch.Tensor)
            assert torch.equal(found, weight)
        elif isinstance(found, ScaledTrits):
            assert torch.equal(found.trits, weight.trits)
            rows, count = weight.trits.shape
            scale = found.scale.expand(rows, 1) if found.scale.dim() == 1 else found.scale
            exponent = columns(weight.exponent.int(), weight.group_size, count)
            assert torch.equal(columns(scale.log2(), found.group_size, count), exponent.float())
        else:
            assert kind == "auto"  # a float type, where no ternary one holds the matrix
            assert torch.equal(found, weight.dense())


@pytest.mark.parametrize("kind", ["tq1_0", "tq2_0", "q4_0"])
def test_factors_of_rows_are_in_the_scales_of_blocks(
    make_decoder: Make, export: Export, kind: str
) -> None:
    model = make_decoder("llama", row_scales=True)
    for name, factors in model.named_parameters():
        if name.endswith("row_scale"):
            factors.data.normal_(1.0, 0.3)
    published = GgufModel(GgufFile(export(model, kind)))
    matrices = 0
    for name, weight in exported_weights(model):
        found = published.read(name)
        if (
            isinstance(weight, TernaryWeight)
            and isinstance(found, ScaledTrits)
            and name != "embedding"
        ):
            assert torch.equal(found.trits, weight.trits)
            scale = columns(found.scale, found.group_size, weight.trits.shape[1])
            # The rows of queries and keys are in another order in a file, and come back from it.
            assert torch.equal(scale * found.trits, model.get_submodule(name).dense_weight())
            matrices += 1
    assert matrices == 2 * 7 + 1


def test_a_type_that_would_round_factors_is_refused(make_decoder: Make, export: Export) -> None:
    model = make_decoder("llama", row_scales=True)
    model.blocks[0].feed_forward.up.row_scale.data.fill_(1.1)
    with pytest.raises(
        ConfigError, match="its rows have factors, and BF16 rounds their products"
    ) as caught:
        export(model, "bf16")
    assert "tq2_0" in str(caught.value.hint)


OPTIONS = [
    (
        "llama",
        {
            "rotary_factors": [1.0, 2.0] * 16,
            "rotary_scaling": 4.0,
            "rotary_base": 5e5,
            "norm_eps": 1e-5,
        },
    ),
    ("qwen3", {"tie_embeddings": True, "head_dim": 32}),
    ("arcee", {"linear_scales": True, "query_key_value_bias": True}),
    ("bitnet", {"float_parts": ("norms",)}),
]


@pytest.mark.parametrize(("architecture", "options"), OPTIONS)
def test_options_come_back(
    make_decoder: Make, export: Export, architecture: str, options: dict[str, Any]
) -> None:
    model = make_decoder(architecture, **options)
    published = GgufModel(GgufFile(export(model, "q4_0")))
    config = model.config
    assert published.architecture == architecture
    assert published.vocabulary_size == 256
    assert published.tokenizer == {"kind": "bytes"}
    assert published.unmapped == ()
    wanted = {
        "width": config.width,
        "layers": config.layers,
        "heads": config.heads,
        "kv_heads": config.key_heads,
        "head_dim": config.key_features,
        "feed_forward": config.hidden,
        "activation": config.feed_forward_activation,
        "max_length": config.max_length,
        "norm_eps": pytest.approx(config.norm_eps),
        "rotary_base": config.rotary_base,
        "tie_embeddings": config.tied,
        "group_size": 128,
    }
    if architecture == "llama":
        wanted |= {"rotary_scaling": 4.0, "rotary_factors": [1.0, 2.0] * 16}
    assert published.options == wanted
    assert set(published.names()) == {name for name, _ in exported_weights(model)}


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_float_weights_biases_and_scales_come_back(
    make_decoder: Make, export: Export, architecture: str
) -> None:
    model = make_decoder(
        architecture,
        float_parts=("embedding", "norms"),
        linear_scales=True,
        query_key_value_bias=True,
    )
    for parameter in model.parameters():
        parameter.data += torch.randn(parameter.shape)
    model.blocks[1].attention.query.scale.fill_(0.3)
    published = GgufModel(GgufFile(export(model, "tq2_0")))
    for name, weight in exported_weights(model):
        found = published.read(name)
        if isinstance(weight, TernaryWeight):
            assert isinstance(found, ScaledTrits)
            assert torch.equal(found.trits, weight.trits)
            wanted = torch.ldexp(torch.tensor(weight.scale), weight.exponent[0, 0])
            torch.testing.assert_close(found.scale, wanted.expand(1), rtol=1e-7, atol=0)
        else:
            assert isinstance(found, torch.Tensor)
            assert torch.equal(found, weight)


def matrix(tmp_path: Path, data: np.ndarray, kind: TensorType, shape: tuple[int, ...]) -> GgufFile:
    path = tmp_path / "t.gguf"
    write_gguf(path, {}, [PlannedTensor("t", shape, kind, lambda: [data])])
    return GgufFile(path)


def read(file: GgufFile) -> torch.Tensor | ScaledTrits:
    return read_tensor(file, file.tensors["t"])


def test_scales_are_merged_as_far_as_they_are_equal(tmp_path: Path) -> None:
    trits = np.ones((2, 512), np.int8)
    for exponents, shape, group in (
        ([[3] * 8, [3] * 8], (1,), 512),
        ([[3] * 8, [4] * 8], (2, 1), 512),
        ([[3] * 4 + [4] * 4, [4] * 8], (2, 2), 256),
        ([[3] * 2 + [4] * 6, [4] * 8], (2, 4), 128),
        ([[3] + [4] * 7, [4] * 8], (2, 8), 64),
    ):
        data = encode_trits(trits, np.asarray(exponents, np.int8), Q2_0)
        found = read(matrix(tmp_path, data, Q2_0, (2, 512)))
        assert isinstance(found, ScaledTrits)
        assert (tuple(found.scale.shape), found.group_size) == (shape, group)


def test_two_bits_that_are_no_trits_are_floats(tmp_path: Path) -> None:
    data = encode_trits(np.ones((1, 128), np.int8), np.zeros((1, 1), np.int8), FORK_Q2_0)
    data[0, 2] = 0xFF
    found = read(matrix(tmp_path, data, FORK_Q2_0, (1, 128)))
    assert isinstance(found, torch.Tensor)
    assert found[0, :5].tolist() == [2, 2, 2, 2, 1]


@pytest.mark.parametrize("kind", [TQ2_0, F32])
def test_nan_is_an_error(tmp_path: Path, kind: TensorType) -> None:
    data = np.full((1, kind.row_bytes(256)), 0xFF, np.uint8)
    data[:, :64] = 0 if kind is TQ2_0 else 0xFF
    with pytest.raises(DataError, match="tensor 't' holds numbers that are infinite or NaN"):
        read(matrix(tmp_path, data, kind, (1, 256)))


def rewritten(
    path: Path, keys: Mapping[str, Value | None], drop: str = "", rename: Mapping[str, str] = {}
) -> Path:
    """Write the file ``path`` with other keys, without one tensor or with another name for it."""
    file = GgufFile(path)
    kinds = {key: file.metadata.kind(key) for key in file.metadata}
    metadata: dict[str, Value] = {
        key: Scalar(kind, file.metadata[key])
        for key, kind in kinds.items()
        if kind is not Kind.ARRAY
    }
    metadata |= {key: value for key, value in keys.items() if value is not None}
    for key in (key for key, value in keys.items() if value is None):
        del metadata[key]
    tensors = [
        PlannedTensor(
            rename.get(info.name, info.name),
            info.shape,
            info.type,
            lambda info=info: [file.bytes_of(info)],
        )
        for info in file.tensors.values()
        if info.name != drop
    ]
    write_gguf(path.with_name("other.gguf"), metadata, tensors)
    return path.with_name("other.gguf")


def u32(value: int) -> Scalar:
    return Scalar(Kind.UINT32, value)


WRONG: dict[str, tuple[dict[str, Value | None], str]] = {
    "architecture": (
        {"general.architecture": Scalar(Kind.STRING, "gemma")},
        "the architecture is 'gemma'",
    ),
    "kind": (
        {"general.architecture": u32(1)},
        "'general.architecture' is of kind uint32, which is not str",
    ),
    "missing": ({"llama.block_count": None}, "the metadata have no 'llama.block_count'"),
    "parts": ({"split.count": Scalar(Kind.UINT16, 3)}, "it is one of 3 files of a model"),
    "experts": ({"llama.expert_count": u32(8)}, "the model has experts"),
    "a list": (
        {"llama.attention.head_count": Array(Kind.UINT32, [4, 8])},
        "'llama.attention.head_count' differs from layer to layer",
    ),
    "a long list": (
        {"llama.attention.head_count": Array(Kind.UINT32, [4] * 1000)},
        "'llama.attention.head_count' differs from layer to layer",
    ),
    "heads": ({"llama.attention.head_count": u32(0)}, "do not make an attention"),
    "odd": (
        {"llama.attention.key_length": u32(63)},
        "attention.value_length is not the 63 features of a head",
    ),
    "partial": (
        {"llama.rope.dimension_count": u32(32)},
        "rope.dimension_count is not the 64 features of a head",
    ),
    "eps": (
        {"llama.attention.layer_norm_rms_epsilon": Scalar(Kind.FLOAT32, -1)},
        "layer_norm_rms_epsilon is -1.0; it has to be positive",
    ),
    "many blocks": ({"llama.block_count": u32(2**31)}, "it claims 2147483648 blocks"),
    "more blocks": (
        {"llama.block_count": u32(3)},
        "the tensor of blocks.2.attention.norm is missing",
    ),
    "wide": (
        {"llama.feed_forward_length": u32(513)},
        "has the shape (512, 256), and the keys say (513, 256)",
    ),
    "wider than any": (
        {"llama.feed_forward_length": u32(2**31)},
        "'feed_forward' must be a whole number from 1 to 1048576, not 2147483648",
    ),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_keys_that_do_not_fit_are_an_error(make_decoder: Make, export: Export, name: str) -> None:
    keys, message = WRONG[name]
    path = rewritten(export(make_decoder("llama")), keys)
    with pytest.raises(DataError) as caught:
        GgufModel(GgufFile(path))
    assert caught.value.what.startswith(f"{path}: ")
    assert message in caught.value.what


def test_scales_finer_than_the_group_size_are_an_error(make_decoder: Make, export: Export) -> None:
    model = make_decoder("llama", group_size=64)
    model.blocks[0].attention.query.exponent[0, 0] += 1
    path = rewritten(export(model), {"arb_ternary.group_size": Scalar(Kind.STRING, "128")})
    published = GgufModel(GgufFile(path))
    with pytest.raises(
        DataError, match=r"'blk.0.attn_q.weight' has more scales than its groups \(128\)"
    ):
        published.read("blocks.0.attention.query")
    assert isinstance(published.read("blocks.0.attention.key"), ScaledTrits)


def test_equal_numbers_of_layers_are_one(make_decoder: Make, export: Export) -> None:
    path = rewritten(
        export(make_decoder("llama")), {"llama.attention.head_count": Array(Kind.UINT32, [4, 4])}
    )
    assert GgufModel(GgufFile(path)).options["heads"] == 4


def test_what_has_no_place_in_the_decoder_is_noted(make_decoder: Make, export: Export) -> None:
    keys = {
        "llama.attention.sliding_window": u32(64),
        "tokenizer.ggml.model": Scalar(Kind.STRING, "bert"),
    }
    path = rewritten(
        export(make_decoder("llama", query_key_value_bias=True)),
        keys,
        rename={"blk.1.attn_q.bias": "blk.1.attn_output.bias"},
    )
    assert GgufModel(GgufFile(path)).unmapped == (
        "tensor blk.1.attn_output.bias has no place in the decoder",
        "llama.attention.sliding_window is 64, which the decoder cannot do",
        "the tokenizer (tokenizer.ggml.model: 'bert') has no list of tokens that fits the model",
    )


def test_a_missing_tensor_is_an_error(make_decoder: Make, export: Export) -> None:
    path = rewritten(export(make_decoder("qwen3")), {}, drop="blk.1.attn_k_norm.weight")
    with pytest.raises(DataError, match=r"the tensor of blocks.1.attention.key_norm is missing"):
        GgufModel(GgufFile(path))


def test_a_scale_that_is_not_positive_is_an_error(make_decoder: Make, export: Export) -> None:
    model = make_decoder("llama", linear_scales=True)
    model.blocks[0].attention.query.scale.fill_(-0.5)
    with pytest.raises(DataError, match=r"'blk.0.attn_q.scale' has to be one positive number"):
        GgufModel(GgufFile(export(model))).read("blocks.0.attention.query")


def test_a_bitnet_with_a_squared_relu_says_so_in_its_keys(
    make_decoder: Make, export: Export
) -> None:
    path = export(make_decoder("bitnet"))
    assert GgufModel(GgufFile(path)).options["activation"] == "swiglu"
    path = rewritten(path, {"bitnet.hidden_activation": Scalar(Kind.STRING, "relu2")})
    assert GgufModel(GgufFile(path)).options["activation"] == "reglu2"
