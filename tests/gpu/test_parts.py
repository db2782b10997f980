"""Test the program for machines with a GPU on a machine without one."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from arb_ternary.backends import select

PARTS = Path(__file__).with_name("parts.py")


#: Records its arguments and ends with the given exit code, by default that of what it watches.
WATCHER = """#!/bin/sh
printf '%s\\n' "$PYTORCH_NO_CUDA_MEMORY_CACHING" "$@" >> "$(dirname "$0")/arguments"
echo "watched by a fake"
[ -z "$FAKE_CODE" ] || exit "$FAKE_CODE"
while [ "$1" != "$FAKE_PYTHON" ]; do shift; done
exec "$@"
"""


def _fake_sanitizer(folder: Path) -> Path:
    tool = folder / "compute-sanitizer"
    folder.mkdir(parents=True)
    tool.write_text(WATCHER)
    tool.chmod(0o755)
    return folder


def _load(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{path.stem}_of_a_gpu", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the program as a module."""
    return _load(PARTS, monkeypatch)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, str(PARTS), "facts"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "torch sees no GPU here" in done.stderr


def test_an_unknown_part_is_refused(loaded: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        loaded.main(["fact", "--device", "cpu"])
    assert ended.value.code == 2
    assert (
        "no part is called fact: there are facts, sanitizer, tests, bytes, steps, bench"
        in capsys.readouterr().err
    )


def test_facts_say_what_every_backend_does(
    loaded: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without TileLang, which would compile kernels of sizes that no other test uses.
    found = [each for each in select.candidates("cpu") if each.name != "tilelang"]
    monkeypatch.setattr(select, "candidates", lambda device: found)
    assert loaded.main(["facts", "--device", "cpu", "--out", str(tmp_path)]) == 0
    told = json.loads((tmp_path / "facts.json").read_text())["backends"]
    assert told.keys() == {each.name for each in found}
    assert told["torch"] == "works"


# --- the sanitizer


def test_missing_sanitizer_fails_only_if_it_was_named(
    loaded: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    for named in (False, True):
        part = loaded.Part(out=tmp_path, device="cpu", until=time.monotonic() + 60, named=named)
        assert loaded.sanitizer(part) is not named
        said = capsys.readouterr().out
        assert (
            "compute-sanitizer is neither in PATH nor in CUDA_HOME/bin: nothing was checked" in said
        )


def test_a_part_is_named_where_it_is_asked_for(
    loaded: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", "")
    assert loaded.main(["sanitizer", "--device", "cpu", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "nothing was checked" in said
    assert "wrong: sanitizer" in said


@pytest.mark.parametrize("where", ["PATH", "CUDA_HOME"])
def test_the_sanitizer_watches_steps_of_every_backend_that_works(
    where: str, loaded: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = _fake_sanitizer(tmp_path / "toolkit/bin")
    rest = os.environ["PATH"]
    monkeypatch.setenv("CUDA_HOME", str(tools.parent) if where == "CUDA_HOME" else "")
    monkeypatch.setenv("PATH", f"{tools}:{rest}" if where == "PATH" else rest)
    monkeypatch.setenv("FAKE_PYTHON", sys.executable)
    # The steps themselves run once.
    monkeypatch.setenv("FAKE_CODE", "" if where == "PATH" else "0")
    monkeypatch.setattr(loaded.Part, "backends", lambda part: ["torch"])
    part = loaded.Part(out=tmp_path, device="cpu", until=time.monotonic() + 120)
    assert loaded.sanitizer(part)
    assert json.loads((tmp_path / "sanitizer.json").read_text()) == {"torch": "nothing found"}
    given = (tools / "arguments").read_text().splitlines()
    assert given[:8] == [
        "1",
        "--tool",
        "memcheck",
        "--target-processes",
        "application-only",
        "--error-exitcode",
        "86",
        sys.executable,
    ]
    assert given[9:13] == ["--backend", "torch", "--device", "cpu"]
    assert "watched by a fake" in (tmp_path / "sanitizer-torch.log").read_text()


def test_what_the_sanitizer_finds_is_wrong(
    loaded: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = _fake_sanitizer(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_CODE", "86")
    monkeypatch.setattr(loaded.Part, "backends", lambda part: ["triton", "tilelang"])
    part = loaded.Part(out=tmp_path, device="cpu", until=time.monotonic() + 60)
    assert not loaded.sanitizer(part)
    assert json.loads((tmp_path / "sanitizer.json").read_text()) == {
        "triton": "errors: see sanitizer-triton.log",
        "tilelang": "errors: see sanitizer-tilelang.log",
    }


def test_the_watched_steps_end_when_their_time_is_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = _load(PARTS.with_name("short.py"), monkeypatch)
    assert short.main(["--backend", "torch", "--device", "cpu", "--seconds", "-1"]) == 1
    assert capsys.readouterr().out == "torch on cpu: 0 of 24 combinations\n"


# --- parts of less than ten minutes


def test_the_commands_of_a_part_share_its_time(
    loaded: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def slow(command: list[str], **options: Any) -> SimpleNamespace:
        given.append(options["timeout"])
        now[0] += min(200.0, options["timeout"])
        return SimpleNamespace(returncode=0)

    now = [1000.0]
    monkeypatch.setattr(loaded.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(loaded.subprocess, "run", slow)
    monkeypatch.setattr(loaded.Part, "backends", lambda part: ["triton", "tilelang"])
    for name, part in loaded.PARTS.items():
        if name == "facts":
            continue
        begun = now[0]
        part(loaded.Part(out=tmp_path, device="cpu", until=begun + loaded.LIMIT))
        assert now[0] - begun < 600, name
    assert given


def test_a_command_that_takes_too_long_is_ended(loaded: ModuleType, tmp_path: Path) -> None:
    part = loaded.Part(out=tmp_path, device="cpu", until=time.monotonic() + 1)
    assert part.run("sleep", "-c", "import time; time.sleep(60)") == 124


# --- backends that work


def test_bytes_compare_every_usable_backend(
    loaded: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    part = loaded.Part(out=tmp_path, device="cpu", until=time.monotonic() + 60)
    trained: list[tuple[str, str]] = []

    def run(part: Any, config: str, backend: str, device: str, number: int) -> dict[str, str]:
        trained.append((config, backend))
        return {"model.safetensors": "other" if backend == odd and number == 2 else "same"}

    monkeypatch.setattr(loaded, "_trained", run)
    monkeypatch.setattr(loaded.Part, "backends", lambda part: ["triton", "tilelang"])
    odd = ""
    assert loaded.training_bytes(part)
    assert {backend for _, backend in trained} == {"torch", "triton", "tilelang"}
    odd = "tilelang"
    assert not loaded.training_bytes(part)
    monkeypatch.setattr(loaded.Part, "backends", lambda part: [])
    assert not loaded.training_bytes(part)
    assert "no backend beside torch works on cpu: nothing was compared" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(
    "wheel", ["tilelang-0.1.15-py3-none-any.whl", "attrs-25.1.0-py3-none-any.whl"]
)
def test_tilelang_is_installed_where_its_wheel_is(wheel: str, tmp_path: Path) -> None:
    (tmp_path / wheel).touch()
    command = ["make", "--dry-run", "--no-print-directory", "gpu-offline", f"WHEELS={tmp_path}"]
    done = subprocess.run(command, cwd=PARTS.parents[2], capture_output=True, text=True, check=True)
    assert ("./backends/arb-ternary-tilelang" in done.stdout) == wheel.startswith("tilelang")
    assert "./backends/arb-ternary-triton" in done.stdout


def test_steps_are_timed_on_the_device(
    loaded: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def run(part: Any, name: str, *command: str, **options: Any) -> int:
        asked.append(command)
        return 0

    monkeypatch.setattr(loaded.Part, "run", run)
    assert loaded.steps(loaded.Part(out=tmp_path, device="cuda", until=0.0))
    assert [command[:3] for command in asked] == [("benchmarks/training.py", "--device", "cuda")]
