"""Build ggml alone from the source distribution of llama-cpp-python, as a peer of ``arb bench
kernels``.

Needs pip, cmake and a C++ compiler. Downloads the source distribution from PyPI (75 MB) into a
temporary folder, compiles the two libraries that the bench loads for this processor, and puts them
where it looks for them. Nothing of it becomes part of the project.

    python plugins/arb-ternary-bench/studies/peers/install_ggml.py [--version 0.3.36] [--jobs 2]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from arb_ternary_bench.kernels.peer_ggml import GGML_FOLDER

# : ggml's own project wants files that the source distribution leaves out; a project around it does
# not.
_PROJECT = """
cmake_minimum_required(VERSION 3.18)
project(ggml_alone C CXX)
set(BUILD_SHARED_LIBS ON)
add_subdirectory("${GGML_SOURCE}" ggml)
"""
_PARTS = ("vendor/llama.cpp/ggml/", "vendor/llama.cpp/LICENSE")


def main() -> int:
    """Download, build, install."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", default="0.3.36", help="of llama-cpp-python")
    parser.add_argument("--jobs", default=1, type=int, help="compilers at once")
    parser.add_argument("--sdist", type=Path, help="a source distribution that is there already")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ggml-") as name:
        folder = Path(name)
        source = _unpack(options.sdist or _download(folder, options.version), folder)
        project = folder / "project"
        build = folder / "build"
        project.mkdir()
        (project / "CMakeLists.txt").write_text(_PROJECT, encoding="utf-8")
        configure = [
            "cmake",
            "-S",
            project,
            "-B",
            build,
            f"-DGGML_SOURCE={source}",
            "-DCMAKE_BUILD_TYPE=Release",
        ]
        _run(*configure, "-DGGML_NATIVE=ON", "-DGGML_CCACHE=OFF")
        _run(
            "cmake",
            "--build",
            build,
            "--config",
            "Release",
            "--parallel",
            options.jobs,
            "--target",
            "ggml-cpu",
        )
        GGML_FOLDER.mkdir(parents=True, exist_ok=True)
        shutil.copy(source.parent / "LICENSE", GGML_FOLDER)
        for stem in ("ggml-base", "ggml-cpu"):
            for path in [*build.rglob(f"lib{stem}*.so*"), *build.rglob(f"lib{stem}*.dylib")]:
                shutil.copy(path, GGML_FOLDER, follow_symlinks=False)
    print(f"installed in {GGML_FOLDER}")
    return 0


def _download(folder: Path, version: str) -> Path:
    _run(
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-binary",
        ":all:",
        "--dest",
        folder,
        f"llama-cpp-python=={version}",
    )
    return next(folder.glob("llama_cpp_python-*.tar.gz"))


def _unpack(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        members = [m for m in archive.getmembers() if m.name.partition("/")[2].startswith(_PARTS)]
        archive.extractall(folder / "source", members, filter="data")
    return next((folder / "source").glob("*/vendor/llama.cpp/ggml"))


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    sys.exit(main())
