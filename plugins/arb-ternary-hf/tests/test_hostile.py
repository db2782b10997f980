"""Damaged and hostile folders: an error, never a crash, a hang or much memory."""

from __future__ import annotations

import json
import os
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary.errors import ArbError
from arb_ternary_hf.importer import HfImporter
from arb_ternary_text.interchange.config import ImportConfig
from arb_ternary_text.models.decoder import Decoder, DecoderConfig

Make = Callable[..., Decoder]
Export = Callable[..., Path]

#: Values that programs stumble over.
VALUES: list[Any] = [None, True, -1, 0, 1, 3, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, "", "x", "llama", [], [1], {}]


def mutated_bytes(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 5))):
        kind = chance.randrange(6)
        # Most of a file is weights; what can go wrong is at its beginning.
        reach = len(changed) if chance.random() < 0.2 else min(len(changed), 4000)
        place = chance.randrange(max(reach, 1))
        if kind == 0:
            changed[place : place + 1] = bytes([chance.randrange(256)])
        elif kind == 1:
            del changed[place : place + chance.choice((1, 2, 8, 100))]
        elif kind == 2:
            changed[place:place] = bytes(chance.randrange(256) for _ in range(chance.choice((1, 2, 8))))
        elif kind == 3:
            del changed[chance.randrange(len(changed) + 1) :]
        elif kind == 4:
            changed[place : place + 8] = chance.choice((0, 1, 2**31, 2**63 - 1, 2**64 - 1)).to_bytes(8, "little")
        else:
            digits = [at for at in range(min(len(changed), 4000)) if 48 <= changed[at] < 58]
            if digits:
                changed[chance.choice(digits)] = 48 + chance.randrange(10)
    return bytes(changed)


def mutated_json(value: Any, chance: random.Random) -> Any:
    """``value`` with one value, somewhere in it, replaced, removed or repeated."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(sorted(value))
        if chance.random() < 0.1:
            return {other: part for other, part in value.items() if other != key}
        return {**value, key: mutated_json(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.8:
        place = chance.randrange(len(value))
        return [*value[:place], mutated_json(value[place], chance), *value[place + 1 :]]
    if type(value) is int and chance.random() < 0.5:
        return value + chance.choice((-1, 1, value, 1 << 20))
    return chance.choice(VALUES)


def try_everything(folder: Path) -> bool:
    """Inspect, load and fill; whether the folder was accepted. Only an ``ArbError`` may be raised."""
    importer = HfImporter(ImportConfig())
    importer.recognises(folder)
    try:
        json.dumps(importer.inspect(folder))
        found = importer.load(folder)
        settings = {name: value for name, value in found.model.items() if name != "name"}
        found.fill(Decoder(DecoderConfig(**settings), found.vocabulary_size))
    except ArbError:
        return False
    return True


def attack(folder: Path, source: Path, count: int, seed: int) -> tuple[int, float]:
    """Mutate ``count`` times; how many folders were accepted, and the seconds that the slowest took."""
    chance = random.Random(seed)
    weights = (source / "model.safetensors").read_bytes()
    length = int.from_bytes(weights[:8], "little")
    header, data = json.loads(weights[8 : 8 + length]), weights[8 + length :]
    config = json.loads((source / "config.json").read_text())
    accepted, slowest = 0, 0.0
    folder.mkdir(exist_ok=True)
    for _ in range(count):
        kind = chance.randrange(4)
        new_weights, new_config = weights, json.dumps(config).encode()
        if kind == 0:
            new_weights = mutated_bytes(weights, chance)
        elif kind == 1:
            text = json.dumps(mutated_json(header, chance)).encode()
            new_weights = len(text).to_bytes(8, "little") + text + data
        elif kind == 2:
            new_config = mutated_bytes(new_config, chance)
        else:
            new_config = json.dumps(mutated_json(config, chance)).encode()
        (folder / "model.safetensors").write_bytes(new_weights)
        (folder / "config.json").write_bytes(new_config)
        start = time.perf_counter()
        accepted += try_everything(folder)
        slowest = max(slowest, time.perf_counter() - start)
    return accepted, slowest


def sources(tmp_path: Path, make_decoder: Make, export: Export) -> list[Path]:
    sizes = {"width": 16, "heads": 2, "kv_heads": 1, "layers": 1, "feed_forward": 16, "max_length": 8}
    packed = make_decoder(16, architecture="bitnet", group_size="tensor", scale_rule="frozen", **sizes)
    dense = make_decoder(16, architecture="llama", query_key_value_bias=True, **sizes)
    return [export(packed, tmp_path / "a", layout="packed"), export(dense, tmp_path / "b", layout="dense")]


def test_mutated_folders_are_errors_or_models(tmp_path: Path, make_decoder: Make, export: Export) -> None:
    accepted = 0
    for number, source in enumerate(sources(tmp_path, make_decoder, export)):
        assert try_everything(source)
        taken, slowest = attack(tmp_path / "m", source, 150, seed=number)
        assert slowest < 5
        accepted += taken
    assert 0 < accepted < 290  # some changes are of weights only


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_mutated_folders(tmp_path: Path, make_decoder: Make, export: Export) -> None:
    count = int(os.environ.get("ARB_FUZZ", "100000"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, source in enumerate(sources(tmp_path, make_decoder, export)):
        accepted, slowest = attack(tmp_path / "m", source, count // 2, seed=100 + number)
        print(f"{source.name}: {accepted} of {count // 2} accepted, slowest {slowest:.3f} s")
        assert slowest < 10
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"peak memory grew by {grown} KiB")
    assert grown < 100 * 1024


def test_sizes_that_no_file_holds_take_no_memory(tmp_path: Path, make_decoder: Make, export: Export) -> None:
    source = sources(tmp_path, make_decoder, export)[1]
    config = json.loads((source / "config.json").read_text())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for changes in (
        {"vocab_size": 1 << 24},
        {"hidden_size": 1 << 20},
        {"num_hidden_layers": 4096},
        {"intermediate_size": 1 << 24},
        {"max_position_embeddings": 1 << 30},
    ):
        (source / "config.json").write_text(json.dumps({**config, **changes}))
        accepted = try_everything(source)
        assert accepted == ("max_position_embeddings" in changes)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 * 1024


def test_a_tensor_of_the_file_is_read_alone(tmp_path: Path, make_decoder: Make, export: Export) -> None:
    """What of a file is in memory is the tensor that is asked for."""
    from arb_ternary_hf.published import HfModel

    source = sources(tmp_path, make_decoder, export)[0]
    model = HfModel(source)
    first, second = model.read("final_norm"), model.read("final_norm")
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    assert first.data_ptr() != second.data_ptr()
