"""Files as llama.cpp and its forks write them: every key and type is used, harmless, or named."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import xllamacpp

from arb_ternary.errors import DataError
from arb_ternary_interchange.decoder.published import ScaledTrits
from arb_ternary_interchange.gguf.blocks import decode_floats
from arb_ternary_interchange.gguf.known_keys import (
    HARMLESS,
    HARMLESS_OF_MODEL,
    NEUTRAL,
    NEUTRAL_OF_MODEL,
)
from arb_ternary_interchange.gguf.metadata import ArrayInFile
from arb_ternary_interchange.gguf.model import GgufModel
from arb_ternary_interchange.gguf.reader import GgufFile
from arb_ternary_interchange.gguf.tensor_types import Q4_K, Q6_K, TensorType
from arb_ternary_interchange.gguf.values import Array, Kind, Scalar, Value
from arb_ternary_interchange.gguf.writer import PlannedTensor, write_gguf
from arb_ternary_text.models.decoder import Decoder

Make = Callable[..., Decoder]
Export = Callable[..., Path]

TEXT = "To be, or not to be, that is the question: whether"


def rewritten(
    path: Path,
    keys: Mapping[str, Value | None],
    tensors: Mapping[str, tuple[TensorType, np.ndarray]] | None = None,
) -> Path:
    """Write the file ``path`` with other keys (None removes one) and other bytes of tensors."""
    file = GgufFile(path)
    metadata: dict[str, Value] = {}
    for key, value in file.metadata.items():
        kind = file.metadata.kind(key)
        is_array = isinstance(value, ArrayInFile)
        metadata[key] = Array(value.kind, list(value)) if is_array else Scalar(kind, value)
    for key, changed in keys.items():
        if changed is None:
            metadata.pop(key, None)
        else:
            metadata[key] = changed
    planned = []
    for info in file.tensors.values():
        kind, data = (tensors or {}).get(info.name, (info.type, file.bytes_of(info)))
        planned.append(PlannedTensor(info.name, info.shape, kind, lambda data=data: [data]))
    other = path.with_name("other.gguf")
    write_gguf(other, metadata, planned)
    return other


def real(value: float) -> Scalar:
    return Scalar(Kind.FLOAT32, value)


# --- rotation


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"rope.scaling.factor": real(4.0)}, 4.0),
        ({"rope.scale_linear": real(4.0)}, 4.0),
        ({"rope.scaling.factor": real(2.0), "rope.scale_linear": real(4.0)}, 2.0),
        (
            {"rope.scaling.factor": real(4.0), "rope.scaling.type": Scalar(Kind.STRING, "none")},
            1.0,
        ),
        ({"rope.scaling.factor": real(0.0)}, 1.0),
        ({"rope.scaling.type": Scalar(Kind.STRING, "linear")}, 1.0),
    ],
    ids=["no type", "older key", "both keys", "type none", "zero", "no factor"],
)
def test_rotary_scaling_is_that_of_llama_cpp(
    make_decoder: Make,
    export: Export,
    llama_cpp: Any,
    ours: Any,
    load: Any,
    keys: dict[str, Value],
    scaling: float,
) -> None:
    path = export(make_decoder("llama", seed=5), "f32")
    path = rewritten(path, {f"llama.{key}": value for key, value in keys.items()})
    theirs = llama_cpp(path).log_probabilities(TEXT)
    model, found = load(path)
    assert model.config.rotary_scaling == scaling
    assert found.notes == ()
    torch.testing.assert_close(ours(model, TEXT.encode(), "float")[-1], theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"rope.scaling.type": Scalar(Kind.STRING, "yarn")}, "rope.scaling.type is 'yarn'"),
        ({"rope.scaling.type": Scalar(Kind.STRING, "longrope")}, "type is 'longrope'"),
        ({"rope.scaling.attn_factor": real(1.5)}, "rope.scaling.attn_factor is 1.5"),
        ({"rope.scaling.yarn_ext_factor": real(1.0)}, "rope.scaling.yarn_ext_factor is 1.0"),
        ({"rope.scaling.factor": real(-2.0)}, "rope.scaling.factor is -2.0"),
        ({"rope.scale_linear": real(float("nan"))}, "rope.scale_linear is nan"),
    ],
)
def test_other_rotations_are_refused_by_key(
    make_decoder: Make, export: Export, keys: dict[str, Value], named: str
) -> None:
    path = export(make_decoder("llama"), "f32")
    path = rewritten(path, {f"llama.{key}": value for key, value in keys.items()})
    with pytest.raises(DataError) as caught:
        GgufModel(GgufFile(path))
    assert f"{path}: llama." in caught.value.what
    assert named in caught.value.what


# --- keys


def known_keys() -> Iterator[str]:
    """Yield every key that gguf-py knows, and those of llama.cpp that it does not have."""

    def walk(holder: type) -> Iterator[str]:
        for value in vars(holder).values():
            if isinstance(value, type):
                yield from walk(value)
            elif isinstance(value, str) and "." in value and not value.startswith("gguf."):
                yield value

    templates = {*walk(gguf.constants.Keys), "{arch}.rope.scale_linear", "{arch}.hidden_activation"}
    for template in sorted(templates):
        key = template.format(arch="llama", id=0, name="tool", dense="dense_2")
        if key != "general.alignment":  # the writer's own
            yield key
    yield from ("quantize.imatrix.file", "arb_ternary.group_size", "llama.new", "other.new", "new")


CANDIDATES: tuple[Value, ...] = (
    Scalar(Kind.UINT32, 7),
    Scalar(Kind.FLOAT32, 7.5),
    Scalar(Kind.BOOL, True),
    Scalar(Kind.STRING, "seven"),
    Array(Kind.STRING, ["h e"]),
)


def is_harmless(key: str, value: Value) -> bool:
    """Whether the documented lists say that the key with this value changes nothing."""
    name = key.removeprefix("llama.")
    if name in HARMLESS_OF_MODEL or any(re.fullmatch(pattern, key) for pattern in HARMLESS):
        return True
    values = NEUTRAL.get(key, NEUTRAL_OF_MODEL.get(name, ()))
    return isinstance(value, Scalar) and value.value in values


def test_every_key_is_used_or_harmless_or_named(make_decoder: Make, export: Export) -> None:
    sizes = {"width": 64, "feed_forward": 64, "layers": 1, "heads": 2, "group_size": 64}
    path = export(make_decoder("llama", **sizes), "q4_0")
    tokens = [*GgufFile(path).metadata["tokenizer.ggml.tokens"]][:-1]
    merges = {
        "tokenizer.ggml.tokens": Array(Kind.STRING, [*tokens, "th"]),
        "tokenizer.ggml.merges": Array(Kind.STRING, ["t h"]),
    }
    path = rewritten(path, merges).rename(path.with_name("base.gguf"))
    model = GgufModel(GgufFile(path))
    assert model.tokenizer is not None
    before = (model.options, model.tokenizer)
    assert model.unmapped == ()
    silent = []
    for key in known_keys():
        for value in CANDIDATES:
            try:
                changed = GgufModel(GgufFile(rewritten(path, {key: value})))
                told = any(key in note for note in changed.unmapped)
                used = (changed.options, changed.tokenizer) != before
            except DataError:
                continue
            if not (told or used or is_harmless(key, value)):
                silent.append((key, value))
    assert silent == [("split.count", Scalar(Kind.BOOL, True))]  # which is one part


def test_many_unknown_keys_are_counted(make_decoder: Make, export: Export) -> None:
    keys: dict[str, Value] = {
        f"llama.new.{i:02}": Scalar(Kind.STRING, "x" * 500) for i in range(24)
    }
    keys["llama.new.\x1b"] = Scalar(Kind.STRING, "\n")
    notes = GgufModel(GgufFile(rewritten(export(make_decoder("llama"), "f32"), keys))).unmapped
    assert len(notes) == 21
    assert notes[0] == f"llama.new.00 is {'x' * 80}..., a key that is not known here"
    assert all(note.isprintable() for note in notes)
    assert notes[-1] == "5 further keys are not known here"


def test_added_beginnings_and_adapters_are_named(make_decoder: Make, export: Export) -> None:
    keys: dict[str, Value] = {
        "tokenizer.ggml.add_bos_token": Scalar(Kind.BOOL, True),
        "general.type": Scalar(Kind.STRING, "adapter"),
    }
    notes = GgufModel(GgufFile(rewritten(export(make_decoder("llama"), "f32"), keys))).unmapped
    assert notes == (
        "general.type is adapter, but the file is read as a whole model",
        "tokenizer.ggml.add_bos_token is true, but there is no bos_token_id",
    )


def test_a_tokenizer_with_more_ids_than_the_model_is_named(
    make_decoder: Make, export: Export
) -> None:
    path = export(make_decoder("llama"), "f32")
    more = {"tokenizer.ggml.tokens": Array(Kind.STRING, [f"<{i}>" for i in range(300)])}
    model = GgufModel(GgufFile(rewritten(path, more)))
    assert model.tokenizer is None
    assert "the tokenizer has 300 ids and the model 256" in model.unmapped[0]


# --- types of tensors


def test_i2_s_of_a_fork_is_named_with_the_way_that_works(
    make_decoder: Make, export: Export
) -> None:
    path = export(make_decoder("llama"), "f32")
    number = 36
    data = bytearray(path.read_bytes())
    name = b"blk.0.attn_q.weight"
    place = data.index(name) + len(name) + 4 + 2 * 8  # number of dimensions, and two of them
    assert data[place : place + 4] == bytes(4)
    data[place : place + 4] = number.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        GgufFile(path)
    assert "tensor 'blk.0.attn_q.weight' is of type 36, which is I2_S" in caught.value.what
    assert "bitnet.cpp" in caught.value.what
    assert "llama-quantize" in caught.value.hint
    assert "TQ2_0" in caught.value.hint


@pytest.fixture(scope="module")
def ggml() -> ctypes.CDLL:
    """llama.cpp's own functions, from the library of its Python package."""
    (library,) = Path(xllamacpp.__path__[0]).glob("xllamacpp*.so")
    return ctypes.CDLL(str(library))


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def quantised(ggml: ctypes.CDLL, values: np.ndarray, kind: TensorType) -> np.ndarray:
    """Return ``values`` as ``llama-quantize`` stores them."""
    rows, columns = values.shape
    values = np.ascontiguousarray(values, np.float32)
    data = np.zeros((rows, kind.row_bytes(columns)), np.uint8)
    store = getattr(ggml, f"quantize_{kind.name.lower().replace('_k', '_K')}")
    store.restype = ctypes.c_size_t
    size = store(
        pointer(values), pointer(data), ctypes.c_int64(rows), ctypes.c_int64(columns), None
    )
    assert size == data.nbytes
    return data


@pytest.mark.parametrize("kind", [Q4_K, Q6_K], ids=["Q4_K", "Q6_K"])
def test_k_quants_are_dequantised_as_llama_cpp_does(ggml: ctypes.CDLL, kind: TensorType) -> None:
    rng = np.random.default_rng(2)
    data = rng.integers(0, 256, (7, kind.row_bytes(512)), np.uint8)
    # Scales of blocks within the range of float16, negative ones included.
    blocks = data.reshape(7, 2, kind.size)
    scales = rng.normal(0, 0.1, (7, 2, 2)).astype("<f2").view(np.uint8)
    if kind is Q4_K:
        blocks[..., :4] = scales
    else:
        blocks[..., -2:] = scales[..., :2]
    theirs = np.zeros((7, 512), np.float32)
    name = f"dequantize_row_{kind.name.lower().replace('_k', '_K')}"
    getattr(ggml, name)(pointer(data), pointer(theirs), ctypes.c_int64(theirs.size))
    found = decode_floats(data, kind)
    np.testing.assert_allclose(found, theirs, rtol=2e-7, atol=2e-6)
    number = gguf.GGMLQuantizationType[kind.name]
    np.testing.assert_array_equal(found, gguf.quants.dequantize(data, number))


@pytest.mark.parametrize("kind", [Q4_K, Q6_K], ids=["Q4_K", "Q6_K"])
def test_a_file_of_llama_quantize_computes_the_same(
    make_decoder: Make,
    export: Export,
    llama_cpp: Any,
    ours: Any,
    load: Any,
    ggml: ctypes.CDLL,
    kind: TensorType,
) -> None:
    model = make_decoder("llama", float_parts=("embedding", "norms"))
    embedding = model.embedding.weight.detach().numpy()
    stored = {"token_embd.weight": (kind, quantised(ggml, embedding, kind))}
    path = rewritten(export(model, "tq2_0"), {}, stored)
    again, found = load(path)
    assert found.notes == ()
    published = GgufModel(GgufFile(path))
    assert isinstance(published.read("blocks.0.attention.query"), ScaledTrits)
    number = gguf.GGMLQuantizationType[kind.name]
    wanted = gguf.quants.dequantize(stored["token_embd.weight"][1], number)
    np.testing.assert_array_equal(again.embedding.weight.detach().numpy(), wanted)
    # The same weights with float linears, whose activations llama.cpp does not round.
    path = rewritten(export(model, "f32"), {}, stored)
    again, _ = load(path)
    theirs = llama_cpp(path).log_probabilities(TEXT)
    torch.testing.assert_close(ours(again, TEXT.encode(), "float")[-1], theirs, atol=1e-4, rtol=0)
