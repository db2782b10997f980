from __future__ import annotations

import json
import random
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from arb_ternary.errors import ComponentError, DataError
from arb_ternary_train.safetensors_file import DTYPES, SafetensorsFile, write_safetensors

TEXT = 'quotes " and \\, lines \n\t\b\f, \x1f \x7f, ü and \U0001f600'


def tensors_of_all_kinds() -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for number, dtype in enumerate(DTYPES.values()):
        matrix = torch.arange(12).reshape(3, 4).to(torch.float32).to(dtype)
        found |= {
            f"z.{number}": matrix,
            f"a.{number}": matrix[1, 1],
            f'é"\\\n\x7f\x01{number}': matrix[:0],
        }
    return found


def raw(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_the_bytes_are_those_of_the_library(tmp_path: Path) -> None:
    tensors = tensors_of_all_kinds()
    write_safetensors(tmp_path / "ours", tensors, TEXT)
    safetensors.torch.save_file(
        {k: t.clone() for k, t in tensors.items()}, tmp_path / "theirs", {"arb_ternary": TEXT}
    )
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_every_tensor_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_safetensors(path, tensors_of_all_kinds(), TEXT)
    ours = SafetensorsFile(path)
    theirs = safetensors.torch.load_file(path)
    assert set(ours) == set(theirs)
    assert ours.metadata == {"arb_ternary": TEXT}
    for name, tensor in theirs.items():
        for found in (ours[name], ours.outline(name)):
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert (
            ours[name].view(-1).view(torch.uint8).tolist()
            == tensor.view(-1).view(torch.uint8).tolist()
        )


def test_parts_come_in_any_order_and_must_be_as_announced(tmp_path: Path) -> None:
    class Parts:
        def __init__(self, outlines: dict[str, Tensor], *parts: dict[str, Tensor]) -> None:
            self.outlines = lambda: outlines.items()
            self.parts = lambda: parts

    tensors = {"a": torch.arange(5), "b": torch.ones(2, 3)}
    meta = {name: tensor.to("meta") for name, tensor in tensors.items()}
    write_safetensors(tmp_path / "whole", tensors, "")
    write_safetensors(tmp_path / "parts", Parts(meta, {"b": tensors["b"]}, {"a": tensors["a"]}), "")
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()
    with pytest.raises(ComponentError, match=r"a: torch\.int32"):
        write_safetensors(tmp_path / "parts", Parts(meta, {"a": tensors["a"].int()}), "")
    with pytest.raises(ComponentError, match=r"c: torch\.complex128 cannot go into"):
        write_safetensors(tmp_path / "parts", {"c": torch.zeros(1, dtype=torch.complex128)}, "")


def test_one_part_is_in_memory_at_a_time(tmp_path: Path) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def tensor() -> Tensor:
        nonlocal most
        made = torch.ones(16)
        alive.append(weakref.ref(made))
        most = max(most, sum(each() is not None for each in alive))
        return made

    class Parts:
        def outlines(self) -> Iterator[tuple[str, Tensor]]:
            return ((str(number), torch.empty(16, device="meta")) for number in range(20))

        def parts(self) -> Iterator[dict[str, Tensor]]:
            return ({str(number): tensor()} for number in range(20))

    write_safetensors(tmp_path / "t", Parts(), "")
    assert most <= 2  # the next is made before the name of the last is free
    assert len(SafetensorsFile(tmp_path / "t")) == len(alive) == 20


ENTRY = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
HOSTILE = {
    "empty": b"",
    "short": b"\x01\x00",
    "header beyond the file": (1 << 62).to_bytes(8, "little") + b"{}",
    "no JSON": raw(b"{]"),
    "not UTF-8": raw(b'{"\xff": 1}'),
    "a list": raw([]),
    "deep": raw(b"[" * 200_000),
    "many small values": raw(b'{"a":[' + b"{}," * 3_000_000 + b"{}]}"),
    "twice": raw(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}'),
    "a tensor that is a number": raw({"a": 1}),
    "metadata that are not texts": raw({"__metadata__": {"format": 1}}),
    "unknown kind": raw({"a": {**ENTRY, "dtype": "Q3"}}, bytes(4)),
    "kind that is a list": raw({"a": {**ENTRY, "dtype": ["U8"]}}, bytes(4)),
    "negative size": raw({"a": {**ENTRY, "shape": [-4]}}, bytes(4)),
    "size that is true": raw({"a": {**ENTRY, "shape": [True, 4]}}, bytes(4)),
    "size that is a fraction": raw({"a": {**ENTRY, "shape": [4.0]}}, bytes(4)),
    "vast sizes": raw({"a": {**ENTRY, "shape": [1 << 47] * 16}}, bytes(4)),
    "more sizes than a tensor has": raw({"a": {**ENTRY, "shape": [1] * 10_000 + [4]}}, bytes(4)),
    "other size": raw({"a": {**ENTRY, "shape": [5]}}, bytes(4)),
    "one offset": raw({"a": {**ENTRY, "data_offsets": [4]}}, bytes(4)),
    "backwards": raw({"a": {**ENTRY, "shape": [0], "data_offsets": [4, 0]}}, bytes(4)),
    "overlap": raw({"a": ENTRY, "b": {**ENTRY, "data_offsets": [2, 6]}}, bytes(6)),
    "gap": raw({"a": ENTRY, "b": {**ENTRY, "data_offsets": [6, 10]}}, bytes(10)),
    "truncated": raw({"a": ENTRY}, bytes(3)),
    "more than its tensors": raw({"a": ENTRY}, bytes(5)),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_damaged_file_is_named(what: str, tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(HOSTILE[what])
    with pytest.raises(
        DataError, match=r"t\.safetensors: the file is damaged or truncated, or not safetensors: "
    ):
        SafetensorsFile(path)


def test_no_mutation_of_a_file_does_anything_else_than_that(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    write_safetensors(path, {"a": torch.arange(6).reshape(2, 3), "b": torch.zeros(3)}, "text")
    whole = path.read_bytes()
    draws = random.Random(0)
    for _ in range(1000):
        content = bytearray(whole)
        for _ in range(draws.randint(1, 3)):
            place = draws.randrange(len(content))
            content[place : place + draws.randint(0, 4)] = draws.randbytes(draws.randint(0, 4))
        path.write_bytes(content)
        with suppress(DataError):
            found = SafetensorsFile(path)
            assert sum(found[name].nbytes for name in found) < len(content)


def test_missing_or_shrinking_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    with pytest.raises(DataError, match=r"t\.safetensors: cannot be read: No such file"):
        SafetensorsFile(path)
    write_safetensors(path, {"a": torch.zeros(8)}, "")
    found = SafetensorsFile(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="tensor 'a' ends after 31 of 32 bytes"):
        found["a"]
