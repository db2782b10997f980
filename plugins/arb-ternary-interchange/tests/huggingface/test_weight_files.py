"""The weight files of a folder, against the library safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arb_ternary.errors import DataError
from arb_ternary_interchange.huggingface.folder import WeightFiles
from arb_ternary_interchange.huggingface.shards import write_shards

TENSORS = {
    "a": torch.arange(6, dtype=torch.uint8).view(2, 3),
    "b.weight": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)),
    "c": torch.randn(7, generator=torch.Generator().manual_seed(2)).bfloat16(),
    "empty": torch.zeros(0, 4),
    "scalar": torch.tensor(2.5, dtype=torch.float16),
}


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    write_shards(tmp_path, TENSORS.items(), names=TENSORS, limit=1 << 30, metadata={"format": "pt"})
    read = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in TENSORS.items())
    assert list(tmp_path.iterdir()) == [tmp_path / "model.safetensors"]


def test_shards_respect_the_limit_and_the_index_finds_all(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((25,), float(i)) for i in range(7)}  # 100 bytes each
    write_shards(tmp_path, tensors.items(), names=tensors, limit=250, metadata={})
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 700}
    assert sorted(set(index["weight_map"].values())) == [
        f"model-0000{i}-of-00004.safetensors" for i in (1, 2, 3, 4)
    ]
    files = WeightFiles.open(tmp_path)
    for name, tensor in tensors.items():
        assert torch.equal(files.read(name), tensor)
        assert torch.equal(
            safetensors.torch.load_file(tmp_path / index["weight_map"][name])[name], tensor
        )


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def one(**changes: Any) -> dict[str, Any]:
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


def test_an_index_names_files_of_its_folder_only(tmp_path: Path) -> None:
    write(tmp_path / "x.safetensors", one(), b"\0" * 8)
    index = tmp_path / "model.safetensors.index.json"
    for name, message in (
        ("../x.safetensors", "which is not a file name"),
        ("/etc/passwd", "which is not a file name"),
        (3, "which is not a file name"),
        ("y.safetensors", "cannot be read"),
    ):
        index.write_text(json.dumps({"weight_map": {"t": name}}))
        with pytest.raises(DataError, match=message):
            WeightFiles.open(tmp_path)
    index.write_text(json.dumps({"weight_map": {"u": "x.safetensors"}}))
    with pytest.raises(DataError, match="'u' is not in x"):
        WeightFiles.open(tmp_path)
    index.write_text("{}")
    with pytest.raises(DataError, match="'weight_map' is missing"):
        WeightFiles.open(tmp_path)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has neither model\.safetensors nor"):
        WeightFiles.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        DataError, match=r"pickled files only \(pytorch_model.bin\), which can run code"
    ):
        WeightFiles.open(tmp_path)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=5),
    limit=st.integers(1, 300),
)
def test_any_tensors_in_any_shards_come_back(
    tmp_path_factory: Any, shapes: list[list[int]], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    tensors = {f"name.{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    write_shards(folder, tensors.items(), names=tensors, limit=limit, metadata={"a": "b"})
    files = WeightFiles.open(folder)
    assert files.files.keys() == tensors.keys()
    assert all(torch.equal(files.read(name), tensor) for name, tensor in tensors.items())
