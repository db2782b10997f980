"""The phase ``benchmark`` in whole runs: its report, and kills."""

from __future__ import annotations

import csv
import json
import os
import signal
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary.errors import ConfigError
from arb_ternary_interchange.safetensors.exporter import SafetensorsExporter
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.context import TrainingContext
from arb_ternary_train.loading import load_config
from arb_ternary_train.progress import Silent
from arb_ternary_train.runner import RunRequest, train
from arb_ternary_upcycle.benchmark import phase as phases
from arb_ternary_upcycle.float_model import float_config
from arb_ternary_upcycle.report import writing
from arb_ternary_upcycle.verification import fidelity, kv_cache

CONFIG = """
name: measured
data: {{name: text, path: {folder}/text.txt, tokenizer: bytes}}
model: {{name: decoder, architecture: llama, width: 32, layers: 2, heads: 4, kv_heads: 1,
    feed_forward: 64,
  max_length: 64, group_size: 32}}
optimizer: sign_votes
phases:
  - {{name: standard, steps: 3, batch_size: 2, block_size: 16, eval_every: 2, eval_batches: 1}}
  - {{name: benchmark, teacher: {folder}/teacher, batches: 2, prompt_lengths: [8, 4],
      generation_lengths: [3],
      batch_sizes: [2], warmup_runs: 1, timed_runs: 2}}
checks: [{{name: fidelity, teacher: {folder}/teacher, max_ppl_ratio: 1e9, max_delta_nll: -99,
    fail_fast: false}}]
"""


class Crash(BaseException):
    """An error that nothing catches, as nothing catches kill -9."""


def configs(folder: Path, write_stage: Any) -> Any:
    """A teacher and a text in ``folder``, and a function that loads a student's config.

    Its arguments are pairs of parts of the config's text and what replaces them.
    """
    torch.manual_seed(5)
    options: dict[str, Any] = {
        "width": 32,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "feed_forward": 48,
    }
    small = float_config(DecoderConfig(architecture="llama", max_length=64, **options))
    model = Decoder(small, 256)
    write_stage(folder / "teacher", model)
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 60)

    def load(*changes: tuple[str, str]) -> Any:
        text = CONFIG.format(folder=folder)
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (folder / "run.yaml").write_text(text)
        return load_config(folder / "run.yaml").config

    return load


@pytest.fixture
def config(tmp_path: Path, write_stage: Any) -> Any:
    return configs(tmp_path, write_stage)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, write_stage: Any) -> tuple[Any, Path]:
    """A run with everything in it: its outcome, and its report's folder."""
    folder = tmp_path_factory.mktemp("finished")
    return run(configs(folder, write_stage)(), folder / "run"), folder / "run" / "report"


def run(config: Any, directory: Path, **request: Any) -> Any:
    return train(
        config, RunRequest(directory=directory, backend="torch", reporter=Silent, **request)
    )


class Page(HTMLParser):
    """Everything that a page refers to, its text, and whether its elements are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.text: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        found = dict(attributes)
        self.references += [
            str(found[name])
            for name in ("src", "href", "xlink:href", "srcset", "action", "data")
            if name in found
        ]
        if "id" in found:
            self.ids.append(str(found["id"]))
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_report_formats_agree(finished: tuple[Any, Path]) -> None:
    outcome, folder = finished
    report = json.loads((folder / "report.json").read_text())
    assert {"perplexity", "latency", "memory", "kv_cache", "checks"} <= report.keys()
    for name, rows in report.items():
        if isinstance(rows, list):
            with (folder / f"{name}.csv").open(newline="") as file:
                read = [
                    {key: loaded(value) for key, value in row.items()}
                    for row in csv.DictReader(file)
                ]
            assert read == rows, name
            assert (folder / f"{name}.tex").read_text().count(" & ") >= len(rows)
    teacher, student = report["perplexity"]
    assert student["nll"] == outcome.phases[1]["student_nll"]
    assert student["ratio"] == pytest.approx(student["perplexity"] / teacher["perplexity"])
    assert [(row["model"], row["prompt"]) for row in report["latency"]] == [
        ("teacher", 4),
        ("student", 4),
        ("teacher", 8),
        ("student", 8),
    ]
    assert [row["bytes_per_token"] for row in report["kv_cache"]] == [2 * 32 * 4, 2 * 16 * 4]
    # The checks of the end of the run come after the phase, and are in its report.
    assert [(row["what"], row["passed"]) for row in report["checks"]] == [
        ("delta NLL", False),
        ("perplexity ratio", True),
    ]


def loaded(value: str) -> Any:
    """Convert a cell of a CSV file to a value of JSON."""
    if value in ("", "true", "false"):
        return {"": None, "true": True, "false": False}[value]
    try:
        return int(value) if value.lstrip("-").isdigit() else float(value)
    except ValueError:
        return value


def test_page_contains_everything_it_shows(finished: tuple[Any, Path]) -> None:
    _, folder = finished
    page = Page((folder / "report.html").read_text())
    assert page.open == []
    assert [each for each in page.references if not each.startswith(("data:", "#"))] == []
    assert not {"script", "iframe", "object", "embed"} & page.tags
    drawn = {name for name in page.ids if name.endswith("-figure_1")}
    assert {name.split("-", 1)[1] for name in drawn} >= {
        f"{name}-figure_1" for name in ("perplexity", "latency", "memory", "curve-0")
    }
    assert len(page.ids) == len(set(page.ids))
    files = {file.stem: file.read_bytes() for file in folder.glob("*.png")}
    assert files.keys() == {"perplexity", "latency", "memory", "training"}
    assert all(content.startswith(b"\x89PNG") for content in files.values())
    text = " ".join(page.text)
    for words in (
        "measured",
        "teacher",
        "student",
        "Speed",
        "Memory",
        "Checks",
        "Training",
        "name: measured",
    ):
        assert words in text


def test_killed_benchmark_measures_what_is_missing(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "draw_figures", lambda contents: {})
    whole = run(config(), tmp_path / "whole")
    real = phases.measure_latency
    sizes = []

    def crashing(models: Any, size: Any, **options: Any) -> Any:
        sizes.append(size)
        if len(sizes) == 2:
            raise Crash
        return real(models, size, **options)

    monkeypatch.setattr(phases, "measure_latency", crashing)
    with pytest.raises(Crash):
        run(config(), tmp_path / "cut")
    measurements = tmp_path / "cut/report/measurements"
    kept = (measurements / "latency-8+3x2.json").read_bytes()
    monkeypatch.setattr(phases, "measure_fidelity", lambda *_: pytest.fail("measured again"))
    resumed = run(config(), tmp_path / "cut", resume="auto")
    assert sizes == [(8, 3, 2), (4, 3, 2), (4, 3, 2)]
    assert (measurements / "latency-8+3x2.json").read_bytes() == kept
    assert (measurements / "latency-4+3x2.json").exists()
    assert resumed.phases == whole.phases
    assert (tmp_path / "cut/metrics.jsonl").read_bytes() == (
        tmp_path / "whole/metrics.jsonl"
    ).read_bytes()
    states = [
        sorted((tmp_path / name / "checkpoints").glob("step-*"))[-1] for name in ("cut", "whole")
    ]
    for name in ("model.safetensors", "state.safetensors", "state.json"):
        assert (states[0] / name).read_bytes() == (states[1] / name).read_bytes()


AFTER = """  - {{name: verify, checks: [
      {{name: fidelity, label: first, teacher: {folder}/teacher, max_ppl_ratio: 1e9, batches: 1}},
      {{name: kvcache, teacher: {folder}/teacher, min_reduction_ratio: 1}}]}}
  - {{name: export, exporter: safetensors}}
checks:"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_sigkill_in_verify_benchmark_and_export(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "draw_figures", lambda contents: {})
    made = config(("checks:", AFTER.format(folder=tmp_path)), ("[8, 4]", "[4]"))

    def killed(place: Any, name: str, call: int) -> int:
        """Return the status of a process that kills itself in a call of ``place.name``."""
        child = os.fork()
        if child == 0:
            calls = []
            real = getattr(place, name)

            def dying(*arguments: Any, **options: Any) -> Any:
                calls.append(1)
                if len(calls) == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **options)

            setattr(place, name, dying)
            try:
                run(made, tmp_path / "cut", resume="auto")
            finally:
                os._exit(1)
        return os.waitpid(child, 0)[1]

    run(made, tmp_path / "whole")
    points = [(phases, "measure_memory", 2), (phases, "write_report", 1), (fidelity, "conclude", 1)]
    points += [
        (kv_cache, "conclude", 1),
        (SafetensorsExporter, "export", 1),
        (TrainingContext, "record", 1),
    ]
    for place, name, call in points:
        assert killed(place, name, call) == signal.SIGKILL, name
    run(made, tmp_path / "cut", resume="auto")

    def left(name: str) -> dict[str, bytes]:
        folder = tmp_path / name
        newest = (folder / "checkpoints/latest").read_text().strip()
        patterns = (
            "metrics.jsonl",
            "verify/*.json",
            "export/*",
            f"checkpoints/{newest}/*",
            "report/perplexity.*",
        )
        return {
            str(file.relative_to(folder)).replace(newest, "newest"): file.read_bytes()
            for pattern in patterns
            for file in folder.glob(pattern)
        }

    whole = left("whole")
    cut = left("cut")
    assert len(whole) >= 9
    assert whole == cut


def test_measure_selects_measurements(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "draw_figures", lambda contents: {})
    run(config(("batches: 2,", "batches: 2, measure: [memory],")), tmp_path / "run")
    report = json.loads((tmp_path / "run/report/report.json").read_text())
    assert "memory" in report
    assert not {"perplexity", "latency"} & report.keys()


def test_sizes_beyond_the_context_are_refused(config: Any) -> None:
    with pytest.raises(
        ConfigError, match="62 tokens and 3 after them exceed the context of the model"
    ):
        config(("[8, 4]", "[62, 4]"))
    config(("[8, 4]", "[61, 4]"))
    config(("[8, 4]", "[62, 4]"), ("batches: 2,", "batches: 2, measure: [perplexity],"))
    with pytest.raises(ConfigError, match="65 exceeds the context of the model"):
        config(("batches: 2,", "batches: 2, block_size: 65,"))
