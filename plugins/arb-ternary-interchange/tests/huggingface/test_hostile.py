"""Damaged and hostile folders: an error, never a crash, a hang or much memory."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from arb_ternary.errors import ArbError
from arb_ternary_interchange.huggingface.importer import HfImporter
from arb_ternary_interchange.huggingface.json_file import read_object
from arb_ternary_interchange.huggingface.model import HfModel
from arb_ternary_interchange.huggingface.shards import INDEX_NAME, SINGLE_NAME, write_shards
from arb_ternary_interchange.options import ImportConfig
from arb_ternary_text.data.byte_level import byte_level_bpe
from arb_ternary_text.data.tokenizers import IdTokenizer, from_json
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder

Make = Callable[..., Decoder]
Export = Callable[..., Path]

#: Values that often reveal faults.
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    3,
    2**31,
    2**63,
    10**30,
    0.5,
    -0.0,
    1e308,
    "",
    "x",
    "llama",
    [],
    [1],
    {},
]


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
            changed[place:place] = bytes(
                chance.randrange(256) for _ in range(chance.choice((1, 2, 8)))
            )
        elif kind == 3:
            del changed[chance.randrange(len(changed) + 1) :]
        elif kind == 4:
            changed[place : place + 8] = chance.choice(
                (0, 1, 2**31, 2**63 - 1, 2**64 - 1)
            ).to_bytes(8, "little")
        else:
            digits = [at for at in range(min(len(changed), 4000)) if 48 <= changed[at] < 58]
            if digits:
                changed[chance.choice(digits)] = 48 + chance.randrange(10)
    return bytes(changed)


def mutated_json(value: Any, chance: random.Random) -> Any:
    """Return ``value`` with one value, somewhere in it, replaced or removed."""
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
    """Inspect, load, fill and encode; whether the folder was accepted. Only an ``ArbError`` may be
    raised.
    """
    importer = HfImporter(ImportConfig())
    importer.recognises(folder)
    try:
        json.dumps(importer.inspect(folder))
        found = importer.load(folder)
        settings = {name: value for name, value in found.model.items() if name != "name"}
        found.fill(Decoder(DecoderConfig(**settings), found.vocabulary_size))
        tokenizer = from_json(found.attachments["tokenizer"])
        if not isinstance(tokenizer, IdTokenizer):  # which reads numbers
            tokenizer.decode(tokenizer.encode("hello, low\u00e9r\U0001f600 <s>"))
    except ArbError:
        return False
    return True


def changed_file(folder: Path, kind: str, chance: random.Random) -> tuple[str, bytes]:
    """Return the name of a file of ``folder`` and a changed content of it."""
    if kind == "weights":
        path = chance.choice(sorted(folder.glob("*.safetensors")))
        content = path.read_bytes()
        if chance.random() < 0.5:
            return path.name, mutated_bytes(content, chance)
        length = int.from_bytes(content[:8], "little")
        text = json.dumps(mutated_json(json.loads(content[8 : 8 + length]), chance)).encode()
        return path.name, len(text).to_bytes(8, "little") + text + content[8 + length :]
    path = folder / kind
    content = path.read_bytes()
    if chance.random() < 0.5:
        return path.name, mutated_bytes(content, chance)
    return path.name, json.dumps(mutated_json(json.loads(content), chance)).encode()


def changes(folder: Path, source: Path, kind: str, seed: int) -> Callable[[], int]:
    """Return a function that makes ``folder`` a copy of ``source`` with one changed file, and
    returns the bytes of its files.
    """
    chance = random.Random(seed)
    shutil.copytree(source, folder)
    last = ""

    def change() -> int:
        nonlocal last
        if last:
            shutil.copyfile(source / last, folder / last)
        last, content = changed_file(source, kind, chance)
        (folder / last).write_bytes(content)
        return sum(file.stat().st_size for file in folder.iterdir())

    return change


def definition() -> str:
    """Return a tokenizer of sixteen ids with a part of each kind."""
    pieces = ["<s>", "</s>", "<unk>", *"helowr,", "\u0120", "he", "ll", "hell", "lo"]
    content = byte_level_bpe(
        {piece: number for number, piece in enumerate(pieces)},
        [("h", "e"), ("l", "l"), ("he", "ll"), ("l", "o")],
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": "\\s+|\\w+"},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {
                    "type": "ByteLevel",
                    "add_prefix_space": False,
                    "trim_offsets": True,
                    "use_regex": False,
                },
            ],
        },
        decoder={
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
        added=[
            {"id": number, "content": piece, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for number, piece in enumerate(pieces[:3])
        ],
    )
    content["model"]["unk_token"] = "<unk>"
    replaced = {"type": "Replace", "pattern": {"String": "\u00e9"}, "content": "e"}
    content["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}, replaced]}
    start = {"id": "<s>", "ids": [0], "tokens": ["<s>"]}
    place = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    processor = {"single": place, "pair": [*place, {"Sequence": {"id": "B", "type_id": 1}}]}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        **processor,
        "special_tokens": {"<s>": start},
    }
    return json.dumps(content)


def sources(tmp_path: Path, make_decoder: Make, export: Export) -> list[Path]:
    """Export packed trits in one file, and floats in two with an index; both with a tokenizer."""
    sizes = {
        "width": 16,
        "heads": 2,
        "kv_heads": 1,
        "layers": 1,
        "feed_forward": 16,
        "max_length": 8,
    }
    packed = make_decoder("bitnet", 16, group_size="tensor", scale_rule="frozen", **sizes)
    dense = make_decoder("llama", 16, query_key_value_bias=True, **sizes)
    attached = {"kind": "file", "definition": definition()}
    folders = [
        export(packed, tmp_path / "a", attached, layout="packed"),
        export(dense, tmp_path / "b", attached, layout="dense"),
    ]
    tensors = load_file(folders[1] / SINGLE_NAME)
    (folders[1] / SINGLE_NAME).unlink()
    limit = sum(tensor.nbytes for tensor in tensors.values()) // 2
    write_shards(folders[1], tensors.items(), names=tensors, limit=limit, metadata={"format": "pt"})
    return folders


#: The file that is changed, and the number of the folder.
KINDS = [
    *((kind, number) for kind in ("weights", "config.json", "tokenizer.json") for number in (0, 1)),
    (INDEX_NAME, 1),
]


@pytest.mark.parametrize(("kind", "number"), KINDS)
def test_mutated_folders_are_errors_or_models(
    kind: str, number: int, tmp_path: Path, make_decoder: Make, export: Export, fuzz: Any
) -> None:
    source = sources(tmp_path, make_decoder, export)[number]
    assert (source / INDEX_NAME).exists() == (number == 1)
    assert try_everything(source)
    folder = tmp_path / "m"
    figures = fuzz(changes(folder, source, kind, seed=number), partial(try_everything, folder), 60)
    assert figures.slowest < 5
    assert figures.refused > 10
    # Some changes concern weights only, or names, or what transformers ignores.
    assert figures.accepted > 0


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("kind", "number"), KINDS)
def test_a_hundred_thousand_mutated_folders(
    kind: str, number: int, tmp_path: Path, make_decoder: Make, export: Export, fuzz: Any
) -> None:
    count = int(os.environ.get("ARB_FUZZ", "100000"))
    source = sources(tmp_path, make_decoder, export)[number]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    folder = tmp_path / "m"
    change = changes(folder, source, kind, seed=100 + number)
    figures = fuzz(change, partial(try_everything, folder), count)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(
        f"{kind} of {source.name}: {figures}, peak resident memory grew by {grown} KiB", flush=True
    )
    assert figures.slowest < 10
    assert grown < 100 * 1024


def test_sizes_that_no_file_holds_take_no_memory(
    tmp_path: Path, make_decoder: Make, export: Export
) -> None:
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


#: Reads every tensor of a folder and makes a model of it; prints the peak of the memory that this
#: took.
READ = """
import sys
from pathlib import Path
from arb_ternary_interchange.huggingface.importer import HfImporter
from arb_ternary_interchange.huggingface.model import HfModel
from arb_ternary_interchange.options import ImportConfig

def most():  # ru_maxrss begins with that of the process before exec
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])

before = most()
model = HfModel(Path(sys.argv[1]))
for name in model.names():
    model.read(name)
HfImporter(ImportConfig()).load(Path(sys.argv[1]))
print(most() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the kernel tells no peak of a process"
)
@pytest.mark.parametrize("layout", ["packed", "dense"])
def test_reading_takes_no_more_than_twice_the_files(
    layout: str, tmp_path: Path, make_decoder: Make, export: Export
) -> None:
    """Read trits packed four per byte, and a bfloat16 table that is nearly all of its file."""
    packed = {
        "width": 1024,
        "layers": 4,
        "feed_forward": 2816,
        "group_size": "tensor",
        "scale_rule": "frozen",
    }
    table = {
        "width": 512,
        "layers": 1,
        "tie_embeddings": True,
        "float_parts": ("embedding", "head", "norms"),
    }
    if layout == "packed":
        folder = export(
            make_decoder(architecture="bitnet", **packed), tmp_path / "m", layout=layout
        )
    else:
        model = make_decoder("llama", 40_000, **table)
        folder = export(model, tmp_path / "m", layout=layout, dtype="bfloat16")
    done = subprocess.run(
        [sys.executable, "-c", READ, str(folder)], check=True, capture_output=True, text=True
    )
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{layout}: {int(done.stdout) / size:.2f} times the files, {size} bytes")
    assert int(done.stdout) <= 2 * size


def test_a_tensor_of_the_file_is_read_alone(
    tmp_path: Path, make_decoder: Make, export: Export
) -> None:
    source = sources(tmp_path, make_decoder, export)[0]
    model = HfModel(source)
    first = model.read("final_norm")
    second = model.read("final_norm")
    assert isinstance(first, torch.Tensor)
    assert isinstance(second, torch.Tensor)
    assert first.data_ptr() != second.data_ptr()


def test_half_of_a_surrogate_pair_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / INDEX_NAME
    file.write_text('{"weight_map": {"a": "\\ud800.safetensors"}}')
    with pytest.raises(ArbError, match=r"index\.json: is not JSON: .*surrogates not allowed"):
        read_object(file)
    file.write_text('{"\\ud83d\\ude00": 1}')
    assert read_object(file) == {"\N{GRINNING FACE}": 1}
