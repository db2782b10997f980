"""``arb import`` and ``arb inspect``, with the importer of our own exports and with one from a
plugin.
"""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary.cli.main import main
from arb_ternary.counters.hashing import MICRO, SEED
from arb_ternary.errors import CheckpointError, ConfigError, DataError, UsageProblem
from arb_ternary.plugins.manager import manager, reset_manager
from arb_ternary.plugins.registry import Registry
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_interchange.allocation_limit import AllocationLimit
from arb_ternary_interchange.importing import find_source, import_model
from arb_ternary_interchange.inspection import inspect_path
from arb_ternary_interchange.safetensors.exporter import SafetensorsExporter
from arb_ternary_interchange.safetensors.importer import SafetensorsImporter
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.checkpoint import read_checkpoint
from arb_ternary_train.loading import load_config
from arb_ternary_train.model_state import load_weights
from arb_ternary_train.restore import load_run
from arb_ternary_train.safetensors_file import SafetensorsFile, write_safetensors

#: A plugin with an importer of JSON files, whose content a test chooses, and one of addresses that
#: are the names of such files.
PLUGIN = """
import json
from pathlib import Path

import torch
from attrs import frozen

from arb_ternary import hookimpl
from arb_ternary_interchange.protocols import ImportedModel
from arb_ternary.specs import ImporterSpec

ARB_API_VERSION = (1, 0)


@frozen(kw_only=True)
class Options:
    scales: str = "fold"


class Importer:
    def __init__(self, config):
        self.scales = config.scales

    def recognises(self, source):
        return source.suffix == ".feather"

    def fetch(self, source):
        return Path(source.partition("://")[2])

    def inspect(self, source):
        return {"format": "feather", **json.loads(source.read_text())["shown"]}

    def load(self, source):
        found = json.loads(source.read_text())

        def fill(model):
            if found.get("fails"):
                raise ValueError("a fault in the importer")
            for module in model.modules():
                if hasattr(module, "set_trits"):
                    size = (module.shape.out_features, module.shape.in_features)
                    trits = torch.ones(size, dtype=torch.int8)
                    exponent = torch.full_like(module.exponent, -3)
                    module.set_trits(trits, exponent, torch.full(size, 5, dtype=torch.int8))

        return ImportedModel(
            found["model"], found["size"], found.get("attached",
                {}), fill, (f"scales: {self.scales}",), found["data"]
        )


@hookimpl
def arb_register_importers():
    target = "feathers:Importer"
    return [
        ImporterSpec(name="feather", target=target, config="feathers:Options"),
        ImporterSpec(name="fetched", target=target, config="feathers:Options", schemes=("nest",)),
    ][:COUNT]
"""
MODEL = {"name": "decoder", "width": 16, "layers": 1, "heads": 2, "max_length": 8, "group_size": 32}
TOKENIZER = {"kind": "characters", "alphabet": "".join(map(chr, [10, *range(32, 127)]))}
FEATHER = {
    "model": MODEL,
    "size": 96,
    "attached": {"tokenizer": TOKENIZER},
    "data": {"name": "shakespeare", "tokenizer": "{run}/tokenizer.json"},
    "shown": {
        "architecture": "bird",
        "parameters": 1234,
        "unmapped": ["the crest"],
        "metadata": {"colour": "grey"},
    },
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def feathers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Install the plugin, with its first importer or, by ``indirect``, with this number of
    importers.
    """
    Path("feathers.py").write_text(PLUGIN.replace("COUNT", str(getattr(request, "param", 1))))
    reset_manager()
    manager().load_file(Path("feathers.py"))
    yield
    reset_manager()
    import sys

    sys.modules.pop("feathers", None)


def feather(name: str = "bird.feather", **changes: Any) -> Path:
    Path(name).write_text(json.dumps({**FEATHER, **changes}))
    return Path(name)


# --- exports of this program


def test_an_export_comes_back_in_every_bit_and_is_a_run(
    tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = tiny.run("run")
    assert main(["export", str(run.path), "model.safetensors"]) == 0
    assert main(["import", "model.safetensors", "back"]) == 0
    assert "back: safetensors, model.safetensors" in capsys.readouterr().out
    before = read_checkpoint(run.checkpoints / "step-00000008").model
    after = read_checkpoint(Path("back/checkpoints/step-00000000")).model
    assert set(before) == set(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    torch.rand(7)
    assert main(["import", "model.safetensors", "twice"]) == 0
    for name in ("model.safetensors", "state.safetensors", "manifest.json"):
        once, twice = (
            Path(run_, "checkpoints/step-00000000", name).read_bytes() for run_ in ("back", "twice")
        )
        assert once == twice
    assert main(["export", "back", "again.safetensors"]) == 0
    first = SafetensorsFile(Path("model.safetensors"))
    second = SafetensorsFile(Path("again.safetensors"))
    assert all(torch.equal(first[name], second[name]) for name in first)

    config = load_config(Path("back/config.yaml")).config
    assert config.data.options.tokenizer == str(Path("back/tokenizer.json").resolve())
    parts = config.optimizer.options
    assert (config.optimizer.name, parts.ternary.name, parts.float.name) == (
        "split",
        "scaled_votes",
        "adamw",
    )
    record = json.loads(Path("back/run.json").read_text())
    assert record["imported"] == {
        "source": "model.safetensors",
        "importer": "safetensors",
        "notes": [],
    }
    assert not list(Path().glob(".back*"))
    assert main(["generate", "back", "--prompt", "to be", "--max-new-tokens", "3"]) == 0
    capsys.readouterr()
    assert main(["plot", "back"]) == 1
    assert "no step has been taken yet" in capsys.readouterr().err


def test_training_continues_from_an_import_with_its_votes(
    tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"data={{name: text, path: {tiny.folder / 'text.txt'}}}"
    run, report = tiny.run("run", text, "data.tokenizer=bytes")
    assert main(["export", str(run.path), "model.safetensors"]) == 0
    assert main(["import", "model.safetensors", "back"]) == 0
    settings = ["-o", text, "--steps", "2", "--batch-size", "2", "-o", "phases.0.warmup_steps=0"]
    command = ["train", "back/config.yaml", *settings, "--init-from", "back", "--run-dir", "tuned"]
    assert main(command) == 0
    assert "weights from back/checkpoints/step-00000000" in capsys.readouterr().err

    source, target = (load_run(Path(name), accumulators=True).model for name in ("back", "tuned"))
    load_weights(target, Path("back"), seed=9)
    for (_, before), (_, after) in zip(
        ternary_modules(source), ternary_modules(target), strict=True
    ):
        assert torch.equal(before.logical_votes(), after.logical_votes())
        assert bool(before.logical_votes().any())
        assert torch.equal(before.exponent, after.exponent)
        assert (int(after.control[SEED]), int(after.control[MICRO])) == (9, 0)

    assert (
        main(
            [
                "train",
                "back/config.yaml",
                *settings,
                "--init-from",
                "back",
                "-o",
                "model.group_size=64",
            ]
        )
        == 1
    )
    assert "model.group_size: 32 there, 64 here" in capsys.readouterr().err
    assert report.steps == 8


def test_an_export_of_another_description_is_refused(tiny: Any) -> None:
    run, _ = tiny.run("run", "phases.0.steps=2", "phases.0.warmup_steps=0")
    main(["export", str(run.path), "model.safetensors"])
    file = SafetensorsFile(Path("model.safetensors"))
    facts = json.loads(file.metadata["arb_ternary"])

    def damaged(**changes: Any) -> Path:
        text = json.dumps({**facts, **changes})
        write_safetensors(Path("bad.safetensors"), dict(file), text)
        return Path("bad.safetensors")

    for changes, message in (
        ({"model": {**facts["model"], "width": 32}}, "its tensors are not those of the model"),
        (
            {"model": {**facts["model"], "layers": 4096, "width": 4096}},
            "a model larger than the file holds weights for",
        ),
        ({"vocabulary_size": 10**15}, "a model larger than the file holds weights for"),
        ({"vocabulary_size": -1}, "its metadata are damaged"),
        ({"model": 7}, "its metadata are damaged"),
        ({"tokenizer": "bytes"}, "'tokenizer' is not an object"),
        ({"../../x": {}}, "an attachment cannot be called"),
        ({"run": {}}, "an attachment cannot be called 'run'"),
        ({"structure": {}}, "has changed its model's structure"),
    ):
        with pytest.raises(DataError, match=message):
            import_model(find_source(str(damaged(**changes))), Path("back"))
    with pytest.raises(ConfigError, match="wdth"):
        import_model(find_source(str(damaged(model={**facts["model"], "wdth": 1}))), Path("back"))
    write_safetensors(Path("foreign.safetensors"), {"a": torch.zeros(2)}, "[")
    with pytest.raises(DataError, match="not those of an export of this program"):
        import_model(find_source("foreign.safetensors"), Path("back"))
    assert not [path for path in Path().iterdir() if "back" in path.name]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_mutated_exports_raise_data_errors_only(tmp_path: Path, seed: int) -> None:
    """Try 20,000 mutations: no other exception, no memory beyond the size of the file."""
    model = Decoder(DecoderConfig(width=8, layers=1, heads=1, max_length=8, group_size=32), 8)
    path = tmp_path / "small.safetensors"
    facts = {
        "name": "x",
        "step": 1,
        "model": {**MODEL, "width": 8, "heads": 1},
        "vocabulary_size": 8,
        "versions": {},
    }
    SafetensorsExporter().export(
        model, path, {**facts, "tokenizer": {"kind": "ids", "vocabulary_size": 8}}
    )
    whole = path.read_bytes()
    draws = random.Random(seed)
    importer = SafetensorsImporter()
    header = int.from_bytes(whole[:8], "little") + 8
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(20_000):
        content = bytearray(whole)
        for _ in range(draws.randint(1, 4)):
            place = draws.randrange(header if number % 2 else len(content))
            content[place : place + draws.randint(0, 8)] = draws.randbytes(draws.randint(0, 8))
        path.write_bytes(content)
        importer.recognises(path)
        with suppress(DataError):
            importer.inspect(path)
        with suppress(DataError):
            importer.load(path)
    # KiB: memory of the interpreter itself
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


# --- an importer of a plugin


@pytest.mark.usefixtures("feathers")
def test_a_foreign_model_becomes_a_run_that_trains_and_resumes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["import", str(feather()), "bird", "--scales", "round"]) == 0
    shown = capsys.readouterr()
    assert "note: scales: round" in shown.err
    assert "arb train bird/config.yaml --init-from bird" in shown.err
    assert json.loads(Path("bird/run.json").read_text())["imported"]["notes"] == ["scales: round"]
    trained = load_run(Path("bird"), accumulators=True)
    for _, module in ternary_modules(trained.model):
        assert bool((module.trits() == 1).all())
        assert bool((module.logical_votes() == 5).all())
        assert bool((module.exponent == -3).all())
    assert main(["eval", "bird", "--batches", "1"]) == 0
    command = [
        "train",
        "bird/config.yaml",
        "--steps",
        "2",
        "-o",
        "phases.0.warmup_steps=0",
        "--run-dir",
        "tuned",
    ]
    assert main([*command, "--init-from", "bird"]) == 0
    assert main([*command, "--resume"]) == 0
    capsys.readouterr()
    assert main(["train", "bird/config.yaml", "--run-dir", "bird", "--resume"]) == 1
    assert (
        "arb train bird/config.yaml --init-from bird --run-dir bird-tuned"
        in capsys.readouterr().err
    )


@pytest.mark.usefixtures("feathers")
def test_a_model_may_have_more_ids_than_its_tokenizer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["import", str(feather(size=100)), "bird"]) == 0
    assert main(["eval", "bird", "--batches", "1"]) == 0
    command = [
        "train",
        "bird/config.yaml",
        "--steps",
        "2",
        "-o",
        "phases.0.warmup_steps=0",
        "--run-dir",
        "tuned",
    ]
    assert main([*command, "--init-from", "bird"]) == 0
    assert load_run(Path("tuned")).model.vocabulary_size == 100
    assert main([*command, "--resume"]) == 0
    assert main(["import", str(feather(size=50)), "small"]) == 0
    capsys.readouterr()
    assert main(["eval", "small", "--batches", "1"]) == 1
    assert "it has 96 ids, and the model 50" in capsys.readouterr().err


@pytest.mark.usefixtures("feathers")
def test_a_failed_import_leaves_and_overwrites_nothing() -> None:
    with pytest.raises(ValueError, match="a fault in the importer"):
        import_model(find_source(str(feather(fails=True))), Path("deep/bird"))
    with pytest.raises(ConfigError, match="no data source is called 'nowhere'"):
        import_model(find_source(str(feather(data={"name": "nowhere"}))), Path("deep/bird"))
    assert not Path("deep").exists()
    Path("taken").mkdir()
    with pytest.raises(UsageProblem, match="taken: exists already"):
        import_model(find_source(str(feather())), Path("taken"))


@pytest.mark.usefixtures("feathers")
def test_what_no_importer_reads_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageProblem, match="there is no such file or folder"):
        find_source("nothing.gguf")
    with pytest.raises(UsageProblem, match="no importer takes addresses that begin with nest://"):
        find_source("nest://bird")
    with pytest.raises(UsageProblem, match="no importer is called 'feathr'"):
        find_source(str(feather()), "feathr")
    with pytest.raises(ConfigError, match="wings"):
        find_source(str(feather()), None, ["wings=2"])
    with pytest.raises(ConfigError, match="scales"):
        find_source(str(feather()), "safetensors", ["scales=fold"])
    Path("model.bin").write_bytes(b"\0" * 8)
    with pytest.raises(DataError, match="no installed importer knows this format") as refused:
        find_source("model.bin")
    listed = refused.value.hint.splitlines()[0]
    assert listed.startswith("installed: feather, ")
    assert listed.endswith("safetensors")

    announced = {"owl": "arb-ternary-owl"}
    monkeypatch.setattr(Registry, "not_installed", lambda *_: announced)
    asked = []
    monkeypatch.setattr(
        "arb_ternary_interchange.importing.named_importer", lambda name, *_: asked.append(name)
    )
    monkeypatch.setattr("arb_ternary_interchange.importing._importers", list)
    with pytest.raises(UsageProblem):
        find_source("owl://org/name")
    assert asked == ["owl"]


@pytest.mark.usefixtures("feathers")
@pytest.mark.parametrize("feathers", [2], indirect=True)
def test_importer_is_chosen_by_scheme_and_ambiguity_is_named() -> None:
    found = find_source(f"nest://{feather()}")
    assert (found.name, found.path, found.shown) == (
        "fetched",
        Path("bird.feather"),
        "nest://bird.feather",
    )
    with pytest.raises(DataError, match="several importers recognise it") as refused:
        find_source("bird.feather")
    assert refused.value.hint == "Say which: --format feather or --format fetched"
    assert find_source("bird.feather", "feather").name == "feather"


# --- inspection


@pytest.mark.usefixtures("feathers")
def test_inspect_shows_the_description_of_an_importer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(feather())]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("architecture bird", "parameters 1,234", "colour grey", "not mapped: the crest"):
        assert words in shown
    assert main(["inspect", str(feather()), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "path": "bird.feather",
        "format": "feather",
        **FEATHER["shown"],
    }


@pytest.mark.usefixtures("feathers")
def test_inspect_prints_no_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    evil = "\x1b]0;evil\x07\x9b2J"
    tensors = [{"name": evil, "shape": [2], "type": evil, "bytes": 2}]
    shown = {
        "architecture": evil,
        "metadata": {evil: evil},
        "unmapped": [evil],
        "tensors": tensors,
        "scales": {evil: 1},
    }
    assert main(["inspect", str(feather(shown=shown))]) == 0
    out = capsys.readouterr().out
    assert out.count("]0;evil") == 6
    assert all(character.isprintable() or character == "\n" for character in out)


def test_inspect_counts_parameters_of_exports_and_runs(tiny: Any) -> None:
    run, report = tiny.run("run")
    main(["export", str(run.path), "model.safetensors"])
    of_file = inspect_path("model.safetensors")
    of_run = inspect_path(str(run.path))
    of_checkpoint = inspect_path(str(run.checkpoints / "step-00000006"))
    for found in (of_file, of_run, of_checkpoint):
        assert found["parameters"] == report.audit.parameters
        assert found["architecture"].startswith("decoder, ")
        assert "group_size 32" in found["architecture"]
        assert found["tokenizer"] == "characters"
        assert found["scales"] == "powers of two, one per group of 32"
        assert found["tensors"] == of_run["tensors"]
    stored = sum(
        row.nbytes
        for row in report.audit.rows
        if "votes" not in row.what and "control" not in row.what
    )
    # In a file a trit takes 1.6 bits; in memory the packed form of this backend takes 2.
    assert 8 * stored / report.audit.parameters == pytest.approx(
        of_run["bits_per_weight"], rel=0.05
    )
    assert of_checkpoint["metadata"]["checkpoint"] == "step-00000006"


def test_two_bit_accumulators_hide_the_number_of_parameters(tiny: Any) -> None:
    run, _ = tiny.run("run", "model.vote_bits=2", "optimizer.ternary=scaled_votes")
    assert inspect_path(str(run.path))["parameters"] is None


def test_the_limit_of_allocations_counts_elements_and_tensors() -> None:
    with AllocationLimit("x", 1 << 20):
        torch.zeros(1 << 22)
    with (
        pytest.raises(DataError, match="x: its description asks for a model larger"),
        AllocationLimit("x", 1 << 20),
    ):
        torch.zeros(1 << 26)
    with pytest.raises(DataError), AllocationLimit("x", 0):
        [torch.zeros(1) for _ in range(30_000)]


def test_a_checkpoint_that_is_missing_is_an_error_of_inspect(tiny: Any) -> None:
    run, _ = tiny.run("run", "checkpoint.every=0", "phases.0.steps=2", "phases.0.warmup_steps=0")
    for path in run.checkpoints.iterdir():
        path.rename(tiny.folder / path.name)
    with pytest.raises(CheckpointError, match="no checkpoint here yet"):
        inspect_path(str(run.path))


def test_inspect_counts_parameters_of_decoupled_attention(tiny: Any) -> None:
    options = {
        "width": 32,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "attention": "decoupled",
        "sem_dim": 4,
        "geo_dim": 4,
        "rotary_dim": 8,
        "attention_gate": "true",
        "null_key_value": "true",
    }
    overrides = [f"model.{name}={value}" for name, value in options.items()]
    run, _ = tiny.run("run", "data.tokenizer=bytes", "phases.0.steps=2", *overrides)
    found = inspect_path(str(run.path))
    words = found["architecture"].split(", ")
    assert {
        "attention decoupled",
        "sem_dim 4",
        "geo_dim 4",
        "attention_gate",
        "null_key_value",
    } <= set(words)
    # Width 32: embedding and head of 256 ids; queries and keys of 8 features per head, values of
    # 8, two key heads; a feed-forward layer of 128; in each layer 4 gates and null keys and values
    # of 4 and 8 features. The gains of the norms are float here.
    layer = 32 * (4 * 8 + 2 * 8 + 2 * 8 + 4 * 8) + 2 * 32 * 128 + 4 + 2 * (4 + 8)
    assert found["parameters"] == 2 * 256 * 32 + 2 * layer + 5 * 32
