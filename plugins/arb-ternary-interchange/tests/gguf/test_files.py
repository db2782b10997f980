"""Whole files: written and read by gguf-py, and damaged ones."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from arb_ternary.errors import ArbError, DataError
from arb_ternary_interchange.gguf.metadata import ArrayInFile
from arb_ternary_interchange.gguf.reader import GgufFile, is_gguf
from arb_ternary_interchange.gguf.tensor_types import F32, FORK_Q2_0, Q2_0, TQ2_0, TensorType
from arb_ternary_interchange.gguf.values import Array, Kind, Scalar, Value
from arb_ternary_interchange.gguf.writer import PlannedTensor, write_gguf

SCALARS: dict[str, Value] = {
    "u8": Scalar(Kind.UINT8, 255),
    "i8": Scalar(Kind.INT8, -128),
    "u16": Scalar(Kind.UINT16, 65535),
    "i16": Scalar(Kind.INT16, -32768),
    "u32": Scalar(Kind.UINT32, 2**32 - 1),
    "i32": Scalar(Kind.INT32, -(2**31)),
    "f32": Scalar(Kind.FLOAT32, 0.5),
    "yes": Scalar(Kind.BOOL, True),
    "text": Scalar(Kind.STRING, "Grüße, 世界"),
    "u64": Scalar(Kind.UINT64, 2**64 - 1),
    "i64": Scalar(Kind.INT64, -(2**63)),
    "f64": Scalar(Kind.FLOAT64, 0.1),
}


def zeros(kind: TensorType, rows: int, columns: int, name: str = "t") -> PlannedTensor:
    data = np.zeros((rows, kind.row_bytes(columns)), np.uint8)
    return PlannedTensor(name, (rows, columns), kind, lambda: [data])


def plain(value: object) -> object:
    return [plain(item) for item in value] if isinstance(value, ArrayInFile) else value


def test_every_kind_of_value_comes_back(tmp_path: Path) -> None:
    inner = Array(Kind.ARRAY, [Array(Kind.INT8, [1, -1]), Array(Kind.STRING, [])])
    arrays: dict[str, Value] = {
        "none": Array(Kind.STRING, []),
        "texts": Array(Kind.STRING, ["a", "", "ß"]),
        "flags": Array(Kind.BOOL, [True, False]),
        "numbers": Array(Kind.FLOAT64, [0.25, -1e300]),
        "deep": Array(Kind.ARRAY, [inner, inner]),
    }
    path = tmp_path / "f.gguf"
    write_gguf(path, SCALARS | arrays, [])
    metadata = GgufFile(path).metadata
    assert {key: metadata[key] for key in SCALARS} == {
        key: value.value for key, value in SCALARS.items()
    }
    assert {key: plain(metadata[key]) for key in arrays} == {
        "none": [],
        "texts": ["a", "", "ß"],
        "flags": [True, False],
        "numbers": [0.25, -1e300],
        "deep": [[[1, -1], []], [[1, -1], []]],
    }


def test_a_long_text_is_stepped_over_and_not_read(tmp_path: Path) -> None:
    path = tmp_path / "f.gguf"
    write_gguf(
        path, {"long": Scalar(Kind.STRING, "ü" * 40_000), "after": Scalar(Kind.UINT8, 7)}, []
    )
    metadata = GgufFile(path).metadata
    assert metadata["after"] == 7
    with pytest.raises(DataError, match="long has 80000 bytes; texts of up to 65535 are read"):
        metadata["long"]


def test_gguf_py_reads_our_files(tmp_path: Path) -> None:
    path = tmp_path / "f.gguf"
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensor = PlannedTensor("x", (3, 4), F32, lambda: [values.view(np.uint8)])
    write_gguf(
        path,
        {**SCALARS, "n": Array(Kind.INT32, [1, 2])},
        [tensor, zeros(TQ2_0, 2, 512)],
        alignment=64,
    )
    theirs = gguf.GGUFReader(path)
    assert theirs.get_field("text").contents() == "Grüße, 世界"
    assert theirs.get_field("n").contents() == [1, 2]
    assert [(t.name, t.shape.tolist(), t.tensor_type.name) for t in theirs.tensors] == [
        ("x", [4, 3], "F32"),
        ("t", [512, 2], "TQ2_0"),
    ]
    np.testing.assert_array_equal(theirs.tensors[0].data, values)
    assert GgufFile(path).tensors["t"].start % 64 == 0


def test_files_of_gguf_py_are_read(tmp_path: Path) -> None:
    path = tmp_path / "f.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(77)
    writer.add_token_list(["a", "b"])
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    writer.add_tensor("x", values)
    writer.add_tensor("y", values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["llama.context_length"] == 77
    assert list(file.metadata["tokenizer.ggml.tokens"]) == ["a", "b"]
    assert {name: (info.shape, info.type.name) for name, info in file.tensors.items()} == {
        "x": ((2, 3), "F32"),
        "y": ((2, 3), "F16"),
    }
    np.testing.assert_array_equal(file.bytes_of(file.tensors["x"]).view(np.float32), values)
    np.testing.assert_array_equal(
        file.bytes_of(file.tensors["x"], 1, 2).view(np.float32), values[1:]
    )


@pytest.mark.parametrize("kind", [Q2_0, FORK_Q2_0])
def test_the_size_of_a_tensor_tells_the_two_q2_0_apart(tmp_path: Path, kind: TensorType) -> None:
    path = tmp_path / "f.gguf"
    write_gguf(path, {}, [zeros(kind, 8, 1024, "a"), zeros(kind, 8, 256, "b")])
    assert [info.type for info in GgufFile(path).tensors.values()] == [kind, kind]


def head(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(
    name: bytes = b"t", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0
) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def value(key: bytes, kind: int, data: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + data


def array(kind: int, length: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, length) + data


NESTED = b"".join(array(9, 1) for _ in range(5)) + array(0, 0)
LONG = b"a" * 200_000

BROKEN = {
    "empty": (b"", "the file is empty"),
    "another format": (b"PK\3\4" + bytes(20), "begins with b'PK\\x03\\x04'"),
    "cut in the head": (b"GGUF\3\0\0\0\1", "byte 8: the number of tensors takes 8 bytes"),
    "old": (head(version=1), "byte 4: version 1 is unknown; 2 and 3 are read"),
    "big-endian": (head(version=3 << 24), "the file is big-endian"),
    "many tensors": (head(tensors=2**63), "claims 9223372036854775808 tensors"),
    "many keys": (head(keys=2**63), "claims 9223372036854775808 keys"),
    "missing key": (head(keys=1), "byte 24: the length of key 0 of the metadata takes 8 bytes"),
    "long key": (
        head(keys=1) + struct.pack("<Q", 2**40),
        "key 0 of the metadata has 1099511627776 bytes",
    ),
    "key twice": (head(keys=2) + 2 * value(b"k", 0, b"\1"), "byte 38: the key 'k' occurs twice"),
    "unknown kind": (
        head(keys=1) + value(b"k", 13, b"\1"),
        "the value of 'k' is of the unknown kind 13",
    ),
    "long text": (
        head(keys=1) + value(b"k", 8, struct.pack("<Q", 2**62)),
        "takes 4611686018427387904 bytes",
    ),
    "no UTF-8": (head(keys=1) + value(b"k", 8, text(b"\xff")), "the value of 'k' is not UTF-8"),
    "no UTF-8, late": (
        head(keys=1) + value(b"k", 8, text(LONG + b"\xe4")),
        "the value of 'k' is not UTF-8",
    ),
    "no UTF-8 in a key": (
        head(keys=1) + value(b"\xff", 0, b"\0"),
        "key 0 of the metadata is not UTF-8",
    ),
    "boolean 2": (head(keys=1) + value(b"k", 7, b"\2"), "is 2; a boolean is 0 or 1"),
    "boolean 2 in an array": (
        head(keys=1) + value(b"k", 9, array(7, 2, b"\1\2")),
        "neither 0 nor 1",
    ),
    "long array": (head(keys=1) + value(b"k", 9, array(12, 2**61)), "18446744073709551615"[:4]),
    "long array of texts": (
        head(keys=1) + value(b"k", 9, array(8, 2**40)),
        "claims 1099511627776 items",
    ),
    "deep arrays": (head(keys=1) + value(b"k", 9, NESTED) + bytes(99), "deeper than 4"),
    "alignment 3": (
        head(keys=1) + value(b"general.alignment", 4, struct.pack("<I", 3)),
        "'general.alignment' has to be a power of two",
    ),
    "alignment of another kind": (
        head(keys=1) + value(b"general.alignment", 10, struct.pack("<Q", 32)),
        "'general.alignment' has to be a power of two",
    ),
    "tensor twice": (head(tensors=2) + 2 * tensor() + bytes(200), "tensor 't' occurs twice"),
    "no dimension": (head(tensors=1) + tensor(shape=()) + bytes(99), "has 0 dimensions; 1 to 4"),
    "many dimensions": (head(tensors=1) + tensor(shape=(1,) * 5) + bytes(99), "has 5 dimensions"),
    "dimension 0": (
        head(tensors=1) + tensor(shape=(4, 0)) + bytes(99),
        "has a dimension of 0: (0, 4)",
    ),
    "absurd dimensions": (
        head(tensors=1) + tensor(shape=(2**63, 2**63)) + bytes(99),
        "more than the file can hold",
    ),
    "unknown type": (
        head(tensors=1) + tensor(kind=99) + bytes(99),
        "is of the unknown type 99; known are F32 0",
    ),
    "outside": (head(tensors=1) + tensor(offset=96) + bytes(99), "and the file at"),
    "far outside": (
        head(tensors=1) + tensor(offset=2**63) + bytes(99),
        "more than the file can hold",
    ),
    "crooked": (head(tensors=1) + tensor(offset=1) + bytes(99), "no multiple of the alignment, 32"),
    "half a block": (
        head(tensors=1) + tensor(kind=35, shape=(128,)) + bytes(99),
        "stores 256 columns together",
    ),
    "overlap": (
        head(tensors=2) + tensor(b"a", (16,)) + tensor(b"b", (16,), offset=32) + bytes(200),
        "tensor 'a' ends at byte 160, inside the next one",
    ),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_file_is_an_error_that_says_where(tmp_path: Path, name: str) -> None:
    path = tmp_path / "f.gguf"
    data, expected = BROKEN[name]
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        GgufFile(path)
    assert caught.value.what.startswith(f"{path}: ")
    assert expected in caught.value.what
    assert is_gguf(path) == data.startswith(b"GGUF")


def test_a_truncated_file_is_an_error(
    tmp_path: Path,
) -> None:
    path = tmp_path / "f.gguf"
    write_gguf(path, SCALARS, [zeros(TQ2_0, 1, 256, "a"), zeros(F32, 1, 8, "b")])
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError):
            GgufFile(path)


def test_a_folder_or_missing_file_is_not_recognised(tmp_path: Path) -> None:
    assert not is_gguf(tmp_path)
    assert not is_gguf(tmp_path / "missing")
    with pytest.raises(DataError, match="cannot be read: No such file"):
        GgufFile(tmp_path / "missing")


def test_a_file_is_replaced_only_when_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "f.gguf"
    path.write_bytes(b"old")

    def fails() -> Iterator[np.ndarray]:
        yield np.zeros(16, np.uint8)
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_gguf(path, {}, [PlannedTensor("x", (2, 4), F32, fails)])
    with pytest.raises(ArbError, match="tensor 'x' gave 16 bytes instead of 32"):
        write_gguf(path, {}, [PlannedTensor("x", (2, 4), F32, lambda: [np.zeros(16, np.uint8)])])
    with pytest.raises(DataError, match="cannot hold this"):
        write_gguf(path, {"k": Scalar(Kind.UINT8, 256)}, [])
    with pytest.raises(DataError, match="no UTF-8 form"):
        write_gguf(path, {"k": Scalar(Kind.STRING, "\ud800")}, [])
    with pytest.raises(DataError, match="up to 63 bytes"):
        write_gguf(path, {}, [zeros(F32, 1, 1, "n" * 64)])
    with pytest.raises(DataError, match="occurs twice"):
        write_gguf(path, {}, [zeros(F32, 1, 1), zeros(F32, 1, 1)])
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ArbError, match="cannot be written"):
        write_gguf(path / "below", {}, [])
