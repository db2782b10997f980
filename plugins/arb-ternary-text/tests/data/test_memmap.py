from __future__ import annotations

import io
import typing

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary.errors import DataError
from arb_ternary_text.data import memmap, source
from arb_ternary_text.data.loader import read_windows
from arb_ternary_text.data.memmap import DTYPES, open_tokens, write_tokens
from arb_ternary_text.data.source import digest
from arb_ternary_text.data.tokens import TokensConfig, build

LARGEST = {
    "uint8": 2**8 - 1,
    "uint16": 2**16 - 1,
    "uint32": 2**32 - 1,
    "int32": 2**31 - 1,
    "int64": 2**63 - 1,
}


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_is_read(tmp_path, suffix, dtype):
    path = tmp_path / f"ids{suffix}"
    ids = [0, 1, 200, LARGEST[dtype]]
    write_tokens(path, ids, dtype)
    stream = open_tokens(path, 2**63, dtype=dtype)
    assert stream.dtype == np.dtype(dtype)
    assert stream.tolist() == ids


def test_a_bin_file_is_little_endian_and_nothing_else(tmp_path):
    write_tokens(tmp_path / "ids.bin", [1, 0x1234], "uint16")
    assert (tmp_path / "ids.bin").read_bytes() == b"\x01\x00\x34\x12"


def test_an_npy_file_is_numpys_own(tmp_path):
    write_tokens(tmp_path / "ids.npy", [1, 500], "uint32")
    assert np.load(tmp_path / "ids.npy").tolist() == [1, 500]
    np.save(tmp_path / "theirs.npy", np.array([7, 9], dtype=">u2"))
    stream = open_tokens(tmp_path / "theirs.npy", 10)
    assert read_windows(stream, np.array([0]), 1).data.tolist() == [[7, 9]]


@given(st.lists(st.integers(0, 2**16 - 1), min_size=2, max_size=50), st.data())
def test_a_part_of_a_file_is_that_part(tmp_path_factory, ids, data):
    first = data.draw(st.integers(0, len(ids) - 1))
    last = data.draw(st.integers(first + 1, len(ids)))
    folder = tmp_path_factory.mktemp("ids")
    for name in ("x.bin", "x.npy"):
        write_tokens(folder / name, ids, "uint16")
        stream = open_tokens(folder / name, 2**16, dtype="uint16")
        assert stream[first:last].tolist() == ids[first:last]


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_a_bad_id_is_named_with_file_index_and_byte(tmp_path, suffix):
    path = tmp_path / f"ids{suffix}"
    write_tokens(path, [1, 2, 3, 4, 999, 5, 6, 7], "uint16")
    header = path.stat().st_size - 16
    message = (
        rf"ids\{suffix}: token 4 \(byte {header + 8}\) is 999, outside the vocabulary of 10 ids"
    )
    stream = open_tokens(path, 10, dtype="uint16")
    assert read_windows(stream, np.array([0]), 3).data.tolist() == [[1, 2, 3, 4]]
    with pytest.raises(DataError, match=message):
        read_windows(stream, np.array([0, 1]), 3)
    with pytest.raises(DataError, match=message):  # a slice of a mapping
        read_windows(stream[2:], np.array([1]), 2)


def test_a_negative_id_is_a_bad_id(tmp_path):
    np.array([1, -5, 2], dtype=np.int32).tofile(tmp_path / "ids.bin")
    with pytest.raises(DataError, match=r"token 1 \(byte 4\) is -5"):
        read_windows(open_tokens(tmp_path / "ids.bin", 10, dtype="int32"), np.array([0]), 2)


def test_opening_a_file_reads_none_of_its_ids(tmp_path):
    # A sparse file of 1 TiB: reading it would take hours.
    path = tmp_path / "huge.bin"
    with path.open("wb") as file:
        file.truncate(2**40)
    stream = open_tokens(path, 100, dtype="uint16")
    assert len(stream) == 2**39
    assert read_windows(stream, np.array([2**30]), 4).data.tolist() == [[0] * 5]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "ids.bin"
    write_tokens(path, [1, 2], "uint8")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memmap.os, "fsync", full)
    with pytest.raises(
        DataError, match=r"ids\.bin: the token file cannot be written: No space left on device"
    ):
        write_tokens(path, [3, 4], "uint8")
    assert path.read_bytes() == b"\x01\x02"
    assert [file.name for file in tmp_path.iterdir()] == ["ids.bin"]


@pytest.mark.parametrize(
    ("ids", "dtype", "message"),
    [
        ([1, 300, 2], "uint8", r"id 300 at index 1 does not fit uint8: 0 to 255"),
        ([1, 2, -1], "int32", r"id -1 at index 2 does not fit int32"),
        ([], "uint8", "at least one"),
        ([0.5], "uint8", "integers"),
        ([[1]], "uint8", "one dimension"),
        ([1], "float32", "dtype must be one of uint8"),
    ],
)
def test_invalid_ids_are_refused_before_writing(tmp_path, ids, dtype, message):
    with pytest.raises(DataError, match=message):
        write_tokens(tmp_path / "ids.bin", ids, dtype)
    assert list(tmp_path.iterdir()) == []


def _npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "dtype", "message"),
    [
        ("x.bin", b"", "uint8", "the token file is empty"),
        ("x.bin", b"123", "uint16", r"3 bytes are not a whole number of uint16"),
        ("x.bin", b"12", None, "a .bin file does not say what it holds"),
        ("x.bin", b"12", "float16", "dtype must be one of"),
        ("x.npy", b"", None, "the token file is empty"),
        ("x.npy", b"no numpy file", None, "not a readable .npy file"),
        ("x.npy", _npy(np.arange(100, dtype=np.uint16))[:-1], None, "not a readable .npy file"),
        ("x.npy", _npy(np.zeros(4)), None, r"not float64 \(4,\)"),
        ("x.npy", _npy(np.zeros((2, 2), np.uint8)), None, r"not uint8 \(2, 2\)"),
        ("x.npy", _npy(np.zeros(0, np.uint8)), None, "the token file is empty"),
        (
            "x.npy",
            _npy(np.zeros(4, np.uint8)),
            "uint16",
            "the file holds uint8 and dtype is uint16",
        ),
        ("x.tok", b"12", "uint8", "must end in .bin or .npy"),
    ],
)
def test_files_that_are_not_token_files_are_refused(tmp_path, name, content, dtype, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        open_tokens(tmp_path / name, 256, dtype=dtype)
    assert caught.value.what.startswith(f"{tmp_path / name}: ")


def test_a_pickle_in_an_npy_file_is_never_loaded(tmp_path):
    np.save(tmp_path / "x.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="not a readable"):
        open_tokens(tmp_path / "x.npy", 10)


def test_a_missing_file_names_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DataError, match=r"^gone\.bin: the token file cannot be read: No such file"
    ) as caught:
        build(TokensConfig(train="gone.bin", dtype="uint8", vocabulary_size=3))
    assert str(tmp_path) in caught.value.hint


def test_the_end_of_the_file_is_kept_for_validation(tmp_path):
    write_tokens(tmp_path / "x.npy", np.arange(100), "uint16")
    built = build(
        TokensConfig(train=str(tmp_path / "x.npy"), validation_fraction=0.25, vocabulary_size=100)
    )
    assert built.name == "tokens"
    assert built.train.tolist() == list(range(75))
    assert built.validation.tolist() == list(range(75, 100))
    assert built.tokenizer.vocabulary_size == 100
    assert (
        len(build(TokensConfig(train=str(tmp_path / "x.npy"), vocabulary_size=100)).validation)
        == 10
    )


def test_validation_file_is_read_whole_with_named_tokenizer(tmp_path):
    write_tokens(tmp_path / "train.bin", list(b"To be, "), "uint8")
    write_tokens(tmp_path / "validation.bin", list(b"or not"), "uint8")
    config = TokensConfig(
        train=str(tmp_path / "train.bin"),
        validation=str(tmp_path / "validation.bin"),
        dtype="uint8",
        tokenizer="bytes",
    )
    built = build(config)
    assert (
        built.tokenizer.decode(built.train.tolist() + built.validation.tolist()) == "To be, or not"
    )


def test_the_training_file_is_not_a_validation_file(tmp_path):
    write_tokens(tmp_path / "x.npy", [1, 2], "uint8")
    path = str(tmp_path / "x.npy")
    with pytest.raises(DataError, match="the validation tokens are the training tokens"):
        build(TokensConfig(train=path, validation=path, vocabulary_size=3))


def test_a_file_too_short_to_cut_is_refused(tmp_path):
    write_tokens(tmp_path / "x.npy", [1, 2], "uint8")
    with pytest.raises(DataError, match="2 tokens are too few"):
        build(TokensConfig(train=str(tmp_path / "x.npy"), vocabulary_size=3))


def test_exactly_one_of_tokenizer_and_vocabulary_size():
    with pytest.raises(ValueError, match="neither was given"):
        TokensConfig(train="x.npy")
    with pytest.raises(ValueError, match="both were given"):
        TokensConfig(train="x.npy", tokenizer="bytes", vocabulary_size=256)
    with pytest.raises(
        ValueError, match=r"must be bytes or the path of a \.json or \.model file, not 'characters'"
    ):
        TokensConfig(train="x.npy", tokenizer="characters")
    with pytest.raises(ValueError, match="exclude each other"):
        TokensConfig(train="x", validation="y", validation_fraction=0.1, vocabulary_size=2)


def test_the_config_allows_the_dtypes_that_files_may_hold():
    literal = typing.get_args(typing.get_type_hints(TokensConfig)["dtype"])[0]
    assert typing.get_args(literal) == DTYPES
    assert attrs.fields(TokensConfig).dtype.default is None


def test_a_digest_tells_contents_lengths_and_dtypes_apart():
    ids = np.arange(1000, dtype=np.uint16)
    changed = ids.copy()
    changed[500] ^= 1
    digests = {digest(stream) for stream in (ids, changed, ids[:-1], ids.astype(np.int32))}
    assert len(digests) == 4
    assert digest(ids) == digest(np.repeat(ids, 2)[::2])


def test_digest_of_a_long_stream_samples_all_of_it(monkeypatch):
    monkeypatch.setattr(source, "_WHOLE", 1000)
    monkeypatch.setattr(source, "_PIECE", 10)
    monkeypatch.setattr(source, "_SAMPLES", 5)
    ids = np.zeros(10_000, dtype=np.uint8)
    before = digest(ids)
    for place in (0, -1, 4995):
        changed = ids.copy()
        changed[place] = 1
        assert digest(changed) != before
