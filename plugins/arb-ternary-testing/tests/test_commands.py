"""Test `arb plugins check` and `arb plugins new`."""

from __future__ import annotations

import pytest

from arb_ternary.cli.main import main
from arb_ternary_testing import commands, runner


def test_check_exits_with_the_result_of_the_kit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, str | None]] = []
    monkeypatch.setattr(runner, "check_plugin", lambda name, kind: asked.append((name, kind)) or 1)

    assert main(["plugins", "check", "votes"]) == 1
    assert main(["plugins", "check", "votes", "--kind", "optimizer"]) == 1
    assert asked == [("votes", None), ("votes", "optimizer")]


def test_check_of_an_unknown_plugin_suggests_a_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plugins", "check", "testin"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: no plugin is called 'testin'\n  did you mean 'testing'?\n"
    )


def test_new_writes_a_plugin_and_says_what_is_next(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        commands,
        "new_plugin",
        lambda name, kind, destination: destination / f"arb-ternary-{name}-{kind}",
    )

    assert main(["plugins", "new", "mine", "--kind", "optimizer", "--into", str(tmp_path)]) == 0
    folder = f"{tmp_path}/arb-ternary-mine-optimizer"
    assert capsys.readouterr().out.splitlines() == [
        folder,
        "an optimizer of float parameters, with its tests. Next:",
        f"  cd {folder}",
        "  pip install -e '.[test]'",
        "  python -m pytest",
    ]
    assert main(["plugins", "new", "mine"]) == 2
