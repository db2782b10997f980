"""The examples of the README work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from arb_ternary.cli.main import main

README = Path(__file__).parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def test_the_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python")
    exec(compile(code, str(README), "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.count(",") == 2
    assert Path("rack.safetensors").exists()


def test_the_config_of_the_readme_is_valid_and_can_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = blocks("yaml")
    Path("grown.yaml").write_text(text)
    assert main(["config", "validate", "grown.yaml"]) == 0
    assert main(["progressive", "plan", "grown.yaml"]) == 0
    assert "ternary" in capsys.readouterr().out
