"""Compiled kernels on disk: what distinguishes them, two processes that want the same, an entry that is broken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from arb_ternary.environment import for_child
from arb_ternary.errors import EnvironmentProblem
from arb_ternary_tilelang import cache
from arb_ternary_tilelang.kernels import storage
from arb_ternary_tilelang.lane import cpu_lane

#: Packs and unpacks a matrix, and tells how often a compiler was run for it. A file that is named first says that this
#: process is about to begin, and the next one is waited for: so that two processes begin together.
PROGRAM = """
import json, sys, time
from pathlib import Path
import torch
from tilelang.jit.adapter.libgen import LibraryGenerator
from arb_ternary_tilelang.backend import build
from arb_ternary.backends.protocol import WeightShape

compiled, compile_lib = [], LibraryGenerator.compile_lib

def counted(self, *arguments, **options):
    compiled.append(1)
    return compile_lib(self, *arguments, **options)

LibraryGenerator.compile_lib = counted
kernels = build().kernels
trits = torch.arange(35).view(5, 7).remainder(3).sub(1).to(torch.int8)
if sys.argv[1:]:
    mine, other = map(Path, sys.argv[1:])
    mine.touch()
    while not other.exists():
        time.sleep(0.01)
packed = kernels["pack"](trits)
expected = sum((int(trits[1, k]) + 1 if k < 7 else 1) << (8 * (k % 4) + 2 * (k // 4)) for k in range(16))
print(json.dumps({"compiled": len(compiled), "right": packed.view(torch.int32)[1].item() == expected}))
"""


def start(folder: Path, *arguments: Path) -> subprocess.Popen[str]:
    """A process that keeps its kernels in ``folder``."""
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    temporary = folder.parent / "temporary"
    temporary.mkdir(exist_ok=True)
    environment = for_child(TILELANG_CACHE_DIR=str(folder), TMPDIR=str(temporary))
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[dict[str, Any], str]:
    """What a process printed, and what it said on standard error."""
    said, complaints = process.communicate(timeout=550)
    assert process.returncode == 0, complaints
    return json.loads(said.splitlines()[-1]), complaints


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("kernel_lib.so"))


def test_two_processes_share_one_build_and_a_broken_one_is_compiled_again_with_a_warning(tmp_path: Path) -> None:
    folder, places = tmp_path / "kernels", (tmp_path / "first", tmp_path / "second")
    together = [start(folder, *places), start(folder, *reversed(places))]
    found = [ended(process)[0] for process in together]
    assert sorted(one["compiled"] for one in found) == [0, 1]
    assert all(one["right"] for one in found)
    (library,) = entries(folder)
    assert not list(folder.rglob(".staging/*"))

    library.write_bytes(library.read_bytes()[:-100])
    again, complaints = ended(start(folder))
    assert again == {"compiled": 1, "right": True}
    assert "failed integrity verification" in complaints
    assert str(library.parent) in complaints

    last, complaints = ended(start(folder))
    assert last == {"compiled": 0, "right": True}
    assert complaints == ""
    assert not list((tmp_path / "temporary").glob("*.so")) + list((tmp_path / "temporary").glob("*.cpp"))


def test_a_lock_is_of_one_kernel_and_ends_with_its_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    with cache.taking_turns("pack", "c"), cache.taking_turns("unpack", "c"):
        pass
    with cache.taking_turns("pack", "c"):
        pass
    assert len(list((tmp_path / "arb-ternary-locks").iterdir())) == 2


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(file))
    with pytest.raises(EnvironmentProblem) as caught, cache.taking_turns("pack"):
        pass
    assert caught.value.what == (
        f"backend 'tilelang' keeps its compiled kernels in {file} and cannot write there: Not a directory"
    )
    assert caught.value.hint == "name another folder: TILELANG_CACHE_DIR=..."


def compiler(folder: Path, release: str) -> str:
    """A compiler that says this about itself."""
    folder.mkdir(exist_ok=True)
    path = folder / f"c++{release}"
    path.write_text(f"#!/bin/sh\necho {release}\n")
    path.chmod(0o755)
    return str(path)


def test_a_build_is_shared_where_releases_compiler_and_processor_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = compiler(tmp_path, "14.2"), compiler(tmp_path, "15.1")
    flag = cache.build_flag(first, native=True)
    assert flag == cache.build_flag(first, native=True)
    flags = {flag, cache.build_flag(second, native=True), cache.build_flag(first, native=False)}
    for name in ("tilelang", "torch"):
        with monkeypatch.context() as patch:
            patch.setattr(cache, "version", lambda asked, name=name: "0" if asked == name else "1")
            flags.add(cache.build_flag(first, native=True))
    with monkeypatch.context() as patch:
        patch.setattr(cache, "__version__", "0")
        flags.add(cache.build_flag(first, native=True))
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_processor", lambda: "another processor")
        flags.add(cache.build_flag(first, native=True))
        assert cache.build_flag(first, native=False) in flags, "only native code depends on the processor"
    assert len(flags) == 7
    assert all(one.startswith("-DARB_TERNARY_BUILD=0x") for one in flags)


def test_the_flag_is_part_of_every_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = cpu_lane()
    import tilelang

    seen: list[list[str]] = []
    monkeypatch.setattr(tilelang, "compile", lambda _function, target, compile_flags: seen.append(compile_flags))
    lane.kernel(storage.pack, N=1, K=1)
    assert seen[0][-1].startswith("-DARB_TERNARY_BUILD=0x")
