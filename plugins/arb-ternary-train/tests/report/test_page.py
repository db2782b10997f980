"""The contents of reports, and what happens with runs that lack something."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from arb_ternary.errors import ArbError, UsageProblem
from arb_ternary.ternary.models import ternary_modules
from arb_ternary_train.cli.report import report
from arb_ternary_train.report_page.layers import read_layer_flips
from arb_ternary_train.report_page.page import write_page
from arb_ternary_train.restore import load_run

HOSTILE = '<script>alert("x")</script> & $a$'


def page_of(*runs: Any) -> str:
    destination = runs[0].path / "report.html"
    write_page([run.path for run in runs], destination)
    return destination.read_text()


def words(page: str) -> str:
    """Return the text of a page, without its style."""
    body = page.partition("<body>")[2]
    return unescape(re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", body)))


def titles(page: str) -> list[str]:
    return [unescape(title) for title in re.findall("<section>\n<h2>(.*?)</h2>", page)]


def step(number: int, loss: Any, event: str = "train", **more: Any) -> dict[str, Any]:
    return {"event": event, "step": number, "phase": "standard", "loss": loss, **more}


def test_page_of_a_trained_run(tiny: Any) -> None:
    run, outcome = tiny.run("trained")
    (run.path / "samples").mkdir()
    (run.path / "samples" / "text.txt").write_text("to be or not")
    (run.path / "samples" / "dot.png").write_bytes(b"\x89PNG")
    (run.path / "samples" / "raw.bin").write_bytes(b"\xff\xfe")
    page = page_of(run)
    text = words(page)
    assert titles(page) == [
        "Training",
        "What the model stores",
        "Flips per layer",
        "Samples",
        "Machine and versions",
        "How to repeat it",
    ]
    bits = 8 * outcome.audit.state_bytes / outcome.audit.parameters
    assert f"{bits:.3f} bits per parameter" in text
    assert f"{outcome.audit.state_bytes:,}" in text
    assert f"{outcome.validation_loss:.4g} nats per token" in text
    for label in ("loss over optimizer steps", "flips over optimizer steps"):
        assert f'aria-label="{label}"' in page
    assert "to be or not" in text
    assert 'src="data:image/png;base64,iVBORw=="' in page
    assert "raw.bin: neither text nor a picture or sound" in text
    assert f"torch {torch.__version__}" in text
    assert "not recorded" not in text
    assert "arb train config.yaml --run-dir trained --backend" in text
    assert "seed: 3" in text


def test_flips_are_those_between_two_checkpoints(tiny: Any) -> None:
    run, _ = tiny.run("trained", "checkpoint.keep=9", "checkpoint.every=1")
    found = read_layer_flips(run)
    assert found is not None
    assert (found.first, found.last) == (1, 8)
    folders = [run.checkpoints / f"step-{number:08d}" for number in (1, 8)]
    old, new = (dict(ternary_modules(load_run(folder).model)) for folder in folders)
    assert sum(found.flips.values()) > 0
    assert found.flips == {
        name: int((module.trits() != old[name].trits()).sum()) for name, module in new.items()
    }
    assert found.weights == {name: module.trits().numel() for name, module in new.items()}
    text = words(page_of(run))
    assert "that is kept (steps 1 to 8)" in text
    name, flips = next(iter(found.flips.items()))
    share = 100 * flips / found.weights[name]
    assert f"{name} {found.weights[name]:,} {flips:,} {share:.1f} %" in text


def test_several_runs_share_curves_and_tables(tiny: Any, make_run: Any) -> None:
    first, _ = tiny.run("first")
    second = make_run("second", [step(1, 3.0, lr=0.5), step(2, 2.5, lr=0.25)], seed=9)
    page = page_of(first, second)
    assert "2 runs: first, second" in page
    assert titles(page)[:2] == ["Runs", "Training"]
    svg = page.partition('aria-label="loss over')[2].partition("</svg>")[0]
    assert {"first", "second"} <= set(re.findall("<text[^>]*>(.*?)</text>", svg))
    assert {"var(--first)", "var(--second)"} <= set(re.findall(r"stroke: (var\(--\w+\))", svg))
    rows = re.findall(r"<tr>\s*(.*?)\s*</tr>", page, re.DOTALL)
    (row,) = [row for row in rows if "model.width" in row]
    assert re.findall(r'class="long">(.*?)</td>', row) == ["16", "8"]
    # A run that has not finished has what its metrics say.
    (row,) = [row for row in rows if ">second<" in row and "nats per token" in row]
    cells = [cell.strip() for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)]
    assert cells[:5] == ["second", "no", "2", "-", "-"]


@pytest.mark.parametrize("metrics", [None, [], [step(1, "nan")], [step(1, 2.0)]])
def test_run_that_has_just_begun_is_a_page(make_run: Any, metrics: Any) -> None:
    page = page_of(make_run("begun", metrics))
    assert titles(page) == ["Training", "Machine and versions", "How to repeat it"]
    assert "There are no steps to draw." in page
    assert "state not finished" in words(page)


def test_names_and_texts_are_escaped(make_run: Any) -> None:
    metrics = [
        step(1, 3.0, mark=HOSTILE, mark_kind=HOSTILE),
        step(2, 2.0, **{HOSTILE: 1.0}),
        step(3, 2.0, **{HOSTILE: 2.0}),
    ]
    name = HOSTILE.replace("/", "|")
    run = make_run(name, metrics, config=f"name: '{HOSTILE}'\n", loss_unit=HOSTILE)
    task = {
        "step": 2,
        "lm_eval": "0.4.13",
        "limit": None,
        "apply_chat_template": False,
        "samples": 20,
        "num_fewshot": 5,
        "metrics": {"acc,none": 0.25, "acc_stderr,none": 0.1},
    }
    run.tasks_file.write_text(json.dumps({HOSTILE: task}))
    page = page_of(run)
    assert "<script" not in page
    assert name in words(page)
    assert f"{HOSTILE} 20 5 acc 0.25 0.1 2" in words(page)
    assert f"name: '{HOSTILE}'" in words(page)


def test_dollars_in_names_are_no_formula(make_run: Any) -> None:
    metrics = [step(1, 3.0), step(2, 2.0)]
    runs = [make_run(name, metrics) for name in ("cost $a$", "b")]
    figure = re.search("<svg.*?</svg>", page_of(*runs), re.DOTALL)
    assert figure is not None
    # A formula is drawn without the signs, and in other letters.
    assert "cost $a$" in words(f"<body>{figure[0]}")


def test_errors_leave_the_page_as_it_was(make_run: Any, tmp_path: Path) -> None:
    run = make_run("made", [step(1, 2.0)])
    page = tmp_path / "page.html"
    page.write_text("earlier")
    with pytest.raises(UsageProblem, match="no such directory") as caught:
        write_page([run.path, tmp_path / "mode"], page)
    assert f"did you mean {run.path}?" in caught.value.hint
    run.result_file.write_text('{"audit": {}}')
    with pytest.raises(ArbError, match=r"result\.json: the file is damaged: KeyError"):
        write_page([run.path], page)
    run.result_file.unlink()
    with pytest.raises(ArbError, match="is not a file"):
        write_page([run.path], tmp_path)
    with pytest.raises(ArbError, match="Not a directory"):
        write_page([run.path], page / "below.html")
    assert page.read_text() == "earlier"
    assert {each.name for each in tmp_path.iterdir()} == {"made", "page.html"}


def test_command_writes_into_the_first_run_or_where_it_is_told(make_run: Any) -> None:
    run = make_run("made", [step(1, 2.0)])
    result = CliRunner().invoke(report, [str(run.path)])
    assert result.output == f"{run.path / 'report.html'}\n"
    elsewhere = run.path / "deep" / "page.html"
    result = CliRunner().invoke(report, [str(run.path), "--out", str(elsewhere)])
    assert result.output == f"{elsewhere}\n"
    assert elsewhere.read_bytes() == (run.path / "report.html").read_bytes()
