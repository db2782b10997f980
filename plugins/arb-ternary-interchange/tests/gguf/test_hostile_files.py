"""Files that are changed at random: an error or a model, never a crash, a hang, or memory beyond
the file's size.
"""

from __future__ import annotations

import random
import resource
import struct
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.errors import DataError
from arb_ternary_interchange.gguf.metadata import ArrayInFile
from arb_ternary_interchange.gguf.model import GgufModel
from arb_ternary_interchange.gguf.reader import GgufFile
from arb_ternary_interchange.gguf.values import Array, Kind, Scalar, encode_string
from arb_ternary_interchange.gguf.writer import write_gguf
from arb_ternary_text.models.decoder import Decoder

Make = Callable[..., Decoder]
Export = Callable[..., Path]

NUMBERS = [0, 1, 2, 31, 42, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**33, 2**62, 2**63, 2**64 - 1]


def mutated(data: bytes, header: int, rng: random.Random) -> bytes:
    """Return ``data`` with one to three changes, most of them in its first ``header`` bytes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(min(header, len(changed)) if rng.random() < 0.7 else len(changed))
        match rng.randrange(7):
            case 0:
                changed[place] ^= 1 << rng.randrange(8)
            case 1:
                changed[place] = rng.randrange(256)
            case 2:
                width = rng.choice([4, 8])
                number = rng.choice(NUMBERS) % 2 ** (8 * width)
                changed[place : place + width] = number.to_bytes(width, "little")
            case 3:
                changed[place:place] = rng.randbytes(rng.randint(1, 16))
            case 4:
                del changed[place : place + rng.randint(1, 16)]
            case 5:
                other = rng.randrange(len(changed))
                changed[place : place + 8] = changed[other : other + 8]
            case _:
                del changed[rng.randrange(place, len(changed)) :]
        if not changed:
            return bytes(changed)
    return bytes(changed)


def everything(value: object) -> None:
    if isinstance(value, ArrayInFile):
        for item in value:
            everything(item)


def use(path: Path) -> bool:
    """Read everything in a file; whether it was accepted."""
    try:
        file = GgufFile(path)
        for key in file.metadata:
            everything(file.metadata[key])
        model = GgufModel(file)
        assert isinstance(model.unmapped, tuple)
        for name in model.names():
            model.read(name)
    except DataError as error:
        if not error.what.startswith(f"{path}: "):
            raise
        return False
    return True


def changes(base: Path, path: Path, seed: int) -> Callable[[], int]:
    """Return a function that writes a changed file and returns its size."""
    rng = random.Random(seed)
    data = base.read_bytes()
    header = min(info.start for info in GgufFile(base).tensors.values())

    def change() -> int:
        changed = mutated(data, header, rng)
        path.write_bytes(changed)
        return len(changed)

    return change


@pytest.fixture
def bases(make_decoder: Make, export: Export) -> list[Path]:
    """Export a small decoder of each architecture, with options that a file can hold."""
    small = {"width": 64, "layers": 1, "heads": 2, "feed_forward": 96}
    factors = {
        "rotary_factors": [1.0] * 16,
        "rotary_scaling": 2.0,
        "linear_scales": True,
        "query_key_value_bias": True,
    }
    return [
        export(make_decoder("llama", **small, **factors), "auto", name="llama"),
        export(
            make_decoder("qwen3", **small, float_parts=("embedding", "head")), "auto", name="qwen3"
        ),
        export(
            make_decoder("arcee", **{**small, "width": 256, "feed_forward": 256}),
            "tq1_0",
            name="arcee",
        ),
        export(
            make_decoder("bitnet", **{**small, "width": 256, "feed_forward": 256}),
            "tq2_0",
            name="bitnet",
        ),
    ]


def test_changed_files_are_errors_or_models(bases: list[Path], tmp_path: Path, fuzz: Any) -> None:
    path = tmp_path / "changed.gguf"
    for number, base in enumerate(bases):
        figures = fuzz(changes(base, path, seed=number), partial(use, path), 75)
        assert figures.refused > 20
        assert figures.accepted > 3
        assert figures.slowest < 2


def test_many_small_things_take_no_more_than_twice_the_file(tmp_path: Path) -> None:
    path = tmp_path / "f.gguf"
    texts = Array(Kind.STRING, ["ab"] * 100_000)
    keys = {f"k{i}": Scalar(Kind.UINT8, 0) for i in range(2000)}
    tensors = 4_000
    header = tmp_path / "header.gguf"
    write_gguf(
        header,
        {"texts": texts, "long": Scalar(Kind.STRING, "\U0001f600" * 500_000), **keys},
        [],
        alignment=1,
    )
    data = bytearray(header.read_bytes())
    infos = b"".join(_info(f"t{i}", 32 * i) for i in range(tensors))
    data[8:16] = tensors.to_bytes(8, "little")
    path.write_bytes(bytes(data) + infos + bytes(32 * tensors + 64))
    tracemalloc.start()
    try:
        file = GgufFile(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (len(file.metadata), len(file.tensors)) == (2003, 4_000)
    assert peak <= 2 * path.stat().st_size


def _info(name: str, offset: int) -> bytes:
    return encode_string(name) + struct.pack("<IQIQ", 1, 1, 0, offset)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_changed_files(bases: list[Path], tmp_path: Path, fuzz: Any) -> None:
    path = tmp_path / "changed.gguf"
    for number, base in enumerate(bases):
        figures = fuzz(changes(base, path, seed=100 + number), partial(use, path), 25_000)
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(
            f"{base.name}, {base.stat().st_size} bytes: {figures}, {resident} KiB resident at most",
            flush=True,
        )
        assert figures.slowest < 2
