from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary.errors import CheckpointError, ComponentError
from arb_ternary_train.checkpoint_format import (
    decode_state,
    encode_state,
    file_digest,
    read_manifest,
    read_tensors,
    tensor_digest,
    write_manifest,
    write_tensors,
)

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**200), max_value=2**200)
    | st.floats()
    | st.text()
    | st.binary(max_size=8)
)
keys = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
states = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Return whether two trees are equal, including types, -0.0 and NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(p, q) and same(a[p], b[q]) for p, q in zip(a, b, strict=True)
        )
    return bool(a == b)


@given(states)
def test_every_state_comes_back_exactly_through_json_text(state: Any) -> None:
    tree, tensors = encode_state(state)
    text = json.dumps(tree, allow_nan=False)
    assert same(decode_state(json.loads(text), tensors), state)


def test_tensors_are_stored_under_their_path() -> None:
    state = {
        "a": [torch.tensor(1), {"b": torch.tensor([2.0])}],
        "c/d": torch.tensor(3),
        "c": {"d": torch.tensor(4)},
    }
    tree, tensors = encode_state(state)
    assert set(tensors) == {"a/0", "a/1/b", "c~1d", "c/d"}
    back = decode_state(json.loads(json.dumps(tree)), tensors)
    assert [int(back["a"][0]), float(back["a"][1]["b"]), int(back["c/d"]), int(back["c"]["d"])] == [
        1,
        2.0,
        3,
        4,
    ]


def test_keys_that_print_alike_do_not_share_a_tensor() -> None:
    state = {1: torch.tensor(10), "1": torch.tensor(20)}
    tree, tensors = encode_state(state)
    back = decode_state(json.loads(json.dumps(tree)), tensors)
    assert {key: int(value) for key, value in back.items()} == {1: 10, "1": 20}


def test_state_of_torch_optimizer_and_scheduler_survives() -> None:
    parameters = [torch.nn.Parameter(torch.randn(3, 2)), torch.nn.Parameter(torch.randn(2))]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 1, 3])
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        scheduler.step()
    tree, tensors = encode_state(
        {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    )
    back = decode_state(json.loads(json.dumps(tree)), tensors)
    again = torch.optim.AdamW(parameters, lr=0.5)
    again.load_state_dict(back["optimizer"])
    assert list(again.state_dict()["state"]) == [0, 1]
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert torch.equal(
        again.state[parameters[0]]["exp_avg"], optimizer.state[parameters[0]]["exp_avg"]
    )
    assert back["scheduler"]["milestones"] == Counter({1: 2, 3: 1})
    assert type(back["scheduler"]["milestones"]) is Counter


def test_other_mappings_come_back_as_ordered_dicts() -> None:
    tree, tensors = encode_state(OrderedDict([("z", 1), ("a", 2)]))
    assert list(decode_state(json.loads(json.dumps(tree)), tensors).items()) == [("z", 1), ("a", 2)]


@pytest.mark.parametrize("value", [object(), {1, 2}, np.float64(1.0), np.arange(3), lambda: None])
def test_a_value_that_cannot_be_stored_is_named_by_its_path(value: object) -> None:
    with pytest.raises(ComponentError, match=r"^phase/losses/1: a .* cannot go into a checkpoint"):
        encode_state({"phase": {"losses": [0.0, value]}})


DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_every_dtype_and_form_survive(dtype: torch.dtype, tmp_path: Path) -> None:
    base = torch.arange(12).reshape(3, 4).to(dtype)
    tensors = {
        "whole": base,
        "view": base.T[1:],
        "scalar": base[1, 1],
        "empty": base[:0],
        "again": base,
    }
    digests = write_tensors(tmp_path / "t.safetensors", tensors, "test")
    back = read_tensors(
        tmp_path / "t.safetensors", file_digest(tmp_path / "t.safetensors"), digests
    )
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == dtype
        assert torch.equal(back[name], tensor)


def test_tensor_digest_depends_on_dtype_shape_and_bits() -> None:
    tensor = torch.zeros(2, 3)
    others = [tensor.int(), tensor.reshape(3, 2), torch.tensor([[0, 0, 0], [0, 0, -0.0]])]
    digests = {tensor_digest(t) for t in [tensor, *others]}
    assert len(digests) == 4
    assert tensor_digest(tensor.clone().T.contiguous().T) == tensor_digest(tensor)


def test_file_is_deterministic_plain_safetensors(tmp_path: Path) -> None:
    tensors = {name: torch.arange(4) for name in "badc"}
    contents = set()
    for number in range(8):
        write_tensors(tmp_path / f"{number}.safetensors", tensors, "test")
        contents.add((tmp_path / f"{number}.safetensors").read_bytes())
    assert len(contents) == 1
    assert set(safetensors.torch.load_file(tmp_path / "0.safetensors")) == set("abcd")


def test_a_flipped_bit_in_any_tensor_names_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    digests = write_tensors(path, {"first": torch.zeros(16), "second": torch.zeros(16)}, "test")
    whole = path.read_bytes()
    sha256 = file_digest(path)
    start = len(whole) - 128
    for offset, name in (
        (start, "first"),
        (start + 63, "first"),
        (start + 64, "second"),
        (start + 127, "second"),
    ):
        content = bytearray(whole)
        content[offset] ^= 0x10
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"t\.safetensors: tensor '{name}' is damaged"):
            read_tensors(path, sha256, digests)


def test_flipped_header_bit_names_the_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t.safetensors"
    digests = write_tensors(path, {"first": torch.zeros(4), "second": torch.ones(4)}, "test")
    whole = path.read_bytes()
    sha256 = file_digest(path)
    for offset in range(len(whole) - 32):
        content = bytearray(whole)
        content[offset] ^= 1
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"t\.safetensors: "):
            read_tensors(path, sha256, digests)


def test_truncated_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    digests = write_tensors(path, {"first": torch.zeros(4)}, "test")
    whole = path.read_bytes()
    sha256 = file_digest(path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"t\.safetensors: "):
            read_tensors(path, sha256, digests)


def test_flipped_manifest_bit_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    write_manifest(path, {"step": 3, "files": {"a": {"size": 1}}})
    whole = path.read_bytes()
    assert read_manifest(path)["step"] == 3
    for offset in range(len(whole) - 1):  # the line feed at the end carries nothing
        content = bytearray(whole)
        content[offset] ^= 1
        path.write_bytes(content)
        # White space between values may become other white space, which says the same.
        if read_or_message(path) != content_of(whole):
            assert read_or_message(path).startswith(f"{path}: ")


def content_of(manifest: bytes) -> str:
    body = json.loads(manifest)
    del body["checksum"]
    return json.dumps(body, sort_keys=True)


def read_or_message(path: Path) -> str:
    try:
        return json.dumps(read_manifest(path), sort_keys=True)
    except CheckpointError as error:
        return error.what


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "damaged"),
        (b"[]", "not a checkpoint of arb"),
        (b'{"format": "another"}', "the format is 'another'"),
        (
            b'{"format": "arb-ternary-checkpoint", "version": 99}',
            "format version 99; this program reads versions 1 and 2",
        ),
        (b"\xff\xfe", "damaged"),
    ],
)
def test_a_foreign_manifest_is_refused_by_what_it_is(
    content: bytes, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        read_manifest(path)
