"""Compiled kernels on disk: what distinguishes them, two processes that want the same, an entry
that is broken.
"""

from __future__ import annotations

import json
import os
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

#: Starts processes, one for each file that a line of its input names, and prints their exit codes.
#: Each of them packs a matrix, and tells in its file how often a compiler was run for it; beside it
#: is what it said on standard error. Those of one line begin together. They are forks: what takes
#: several seconds to import is imported once.
PROGRAM = """
import json, os, sys, time, traceback
from pathlib import Path
import torch
from tilelang.jit.adapter.libgen import LibraryGenerator
from arb_ternary_tilelang.backend import build

compiled, compile_lib = [], LibraryGenerator.compile_lib

def counted(self, *arguments, **options):
    compiled.append(1)
    return compile_lib(self, *arguments, **options)

LibraryGenerator.compile_lib = counted

def work(mine, everyone):
    os.dup2(os.open(mine + ".err", os.O_WRONLY | os.O_CREAT), 2)
    kernels = build().kernels
    trits = torch.arange(35).view(5, 7).remainder(3).sub(1).to(torch.int8)
    Path(mine + ".begins").touch()
    while not all(Path(one + ".begins").exists() for one in everyone):
        time.sleep(0.01)
    packed = kernels["pack"](trits)
    expected = sum((int(trits[1,
        k]) + 1 if k < 7 else 1) << (8 * (k % 4) + 2 * (k // 4)) for k in range(16))
    right = packed.view(torch.int32)[1].item() == expected
    Path(mine).write_text(json.dumps({"compiled": len(compiled), "right": right}))

def fork(mine, everyone):
    child = os.fork()
    if child == 0:
        try:
            work(mine, everyone)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child

for line in sys.stdin:
    children = [fork(mine, json.loads(line)) for mine in json.loads(line)]
    print(json.dumps([os.waitpid(child, 0)[1] for child in children]), flush=True)
"""


class Processes:
    """Processes that keep their kernels in one folder."""

    def __init__(self, folder: Path, kernels: Path) -> None:
        self.folder = folder
        temporary = folder / "temporary"
        temporary.mkdir()
        environment = for_child(TILELANG_CACHE_DIR=str(kernels), TMPDIR=str(temporary))
        pipe = subprocess.PIPE
        self.program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=environment,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
        )

    def run(self, *names: str) -> list[tuple[dict[str, Any], str]]:
        """What each of several processes at once found, and what it said on standard error."""
        assert self.program.stdin is not None
        assert self.program.stdout is not None
        files = [self.folder / name for name in names]
        print(json.dumps(list(map(str, files))), file=self.program.stdin, flush=True)
        codes = self.program.stdout.readline()
        complaints = [file.with_name(f"{file.name}.err").read_text() for file in files]
        assert json.loads(codes) == [0] * len(files), complaints
        return [
            (json.loads(file.read_text()), said)
            for file, said in zip(files, complaints, strict=True)
        ]

    def end(self) -> str:
        """End the program; what it said on standard error."""
        return self.program.communicate(timeout=60)[1]


def entries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("kernel_lib.so"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_share_a_build_and_a_broken_one_is_replaced(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "kernels"
    processes = Processes(tmp_path, folder)
    found = [one for one, _ in processes.run("first", "second")]
    assert sorted(one["compiled"] for one in found) == [0, 1]
    assert all(one["right"] for one in found)
    (library,) = entries(folder)
    assert not list(folder.rglob(".staging/*"))

    library.write_bytes(library.read_bytes()[:-100])
    ((again, complaints),) = processes.run("again")
    assert again == {"compiled": 1, "right": True}
    assert "failed integrity verification" in complaints
    assert str(library.parent) in complaints

    ((last, complaints),) = processes.run("last")
    assert last == {"compiled": 0, "right": True}
    assert complaints == ""
    assert processes.end() == ""
    assert not list((tmp_path / "temporary").glob("*.so")) + list(
        (tmp_path / "temporary").glob("*.cpp")
    )


def test_a_lock_is_of_one_kernel_and_ends_with_its_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(tmp_path))
    with cache.taking_turns("pack", "c"), cache.taking_turns("unpack", "c"):
        pass
    with cache.taking_turns("pack", "c"):
        pass
    assert len(list((tmp_path / "arb-ternary-locks").iterdir())) == 2


def test_a_folder_that_cannot_be_written_to_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("TILELANG_CACHE_DIR", str(file))
    with pytest.raises(EnvironmentProblem) as caught, cache.taking_turns("pack"):
        pass
    assert caught.value.what == (
        f"backend 'tilelang' keeps its compiled kernels in {file} and cannot write there: Not a "
        f"directory"
    )
    assert caught.value.hint == "name another folder: TILELANG_CACHE_DIR=..."


def compiler(folder: Path, release: str) -> str:
    """A compiler that says this about itself."""
    folder.mkdir(exist_ok=True)
    path = folder / f"c++{release}"
    path.write_text(f"#!/bin/sh\necho {release}\n")
    path.chmod(0o755)
    return str(path)


def test_build_is_shared_by_release_compiler_and_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiler(tmp_path, "14.2")
    second = compiler(tmp_path, "15.1")
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
        assert cache.build_flag(first, native=False) in flags, (
            "only native code depends on the processor"
        )
    assert len(flags) == 7
    assert all(one.startswith("-DARB_TERNARY_BUILD=0x") for one in flags)


def test_the_flag_is_part_of_every_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = cpu_lane()
    import tilelang

    seen: list[list[str]] = []
    monkeypatch.setattr(
        tilelang, "compile", lambda _function, target, compile_flags: seen.append(compile_flags)
    )
    lane.kernel(storage.pack, N=1, K=1)
    assert seen[0][-1].startswith("-DARB_TERNARY_BUILD=0x")
