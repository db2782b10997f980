"""Build ggml alone, a peer of ``arb bench kernels``, from the sources of llama-cpp-python.

Needs pip, cmake and a C++ compiler. Downloads the source distribution from PyPI (75 MB) into a
temporary folder, compiles the two libraries that the bench loads for this processor, and puts them
where it looks for them. Nothing of it becomes part of the project::

    python -m arb_ternary_bench.kernels.install_ggml [--version 0.3.36] [--jobs 2]
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import click

from arb_ternary_bench.kernels.peer_ggml import GGML_FOLDER

#: ggml's own project wants files that the source distribution lacks; a project around it does not.
_PROJECT = """
cmake_minimum_required(VERSION 3.18)
project(ggml_alone C CXX)
set(BUILD_SHARED_LIBS ON)
add_subdirectory("${GGML_SOURCE}" ggml)
"""
_PARTS = ("vendor/llama.cpp/ggml/", "vendor/llama.cpp/LICENSE")


@click.command(help=__doc__)
@click.option("--version", default="0.3.36", show_default=True, help="Of llama-cpp-python.")
@click.option("--jobs", default=1, show_default=True, help="Compilers at once.")
@click.option(
    "--sdist",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A source distribution that was downloaded before.",
)
def main(version: str, jobs: int, sdist: Path | None) -> None:
    """Download, build, install."""
    with tempfile.TemporaryDirectory(prefix="ggml-") as name:
        folder = Path(name)
        source = _unpack(sdist or _download(folder, version), folder)
        build = folder / "build"
        project = folder / "project"
        project.mkdir()
        (project / "CMakeLists.txt").write_text(_PROJECT, encoding="utf-8")
        options = [f"-DGGML_SOURCE={source}", "-DCMAKE_BUILD_TYPE=Release"]
        options += ["-DGGML_NATIVE=ON", "-DGGML_CCACHE=OFF"]
        _run("cmake", "-S", project, "-B", build, *options)
        target = ["--config", "Release", "--target", "ggml-cpu"]
        _run("cmake", "--build", build, "--parallel", jobs, *target)

        GGML_FOLDER.mkdir(parents=True, exist_ok=True)
        shutil.copy(source.parent / "LICENSE", GGML_FOLDER)
        for stem in ("ggml-base", "ggml-cpu"):
            for path in [*build.rglob(f"lib{stem}*.so*"), *build.rglob(f"lib{stem}*.dylib")]:
                shutil.copy(path, GGML_FOLDER, follow_symlinks=False)
    click.echo(f"installed in {GGML_FOLDER}")


def _download(folder: Path, version: str) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:"]
    _run(*pip, "--dest", folder, f"llama-cpp-python=={version}")
    return next(folder.glob("llama_cpp_python-*.tar.gz"))


def _unpack(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        members = [m for m in archive.getmembers() if m.name.partition("/")[2].startswith(_PARTS)]
        archive.extractall(folder / "source", members, filter="data")
    return next((folder / "source").glob("*/vendor/llama.cpp/ggml"))


def _run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True)


if __name__ == "__main__":
    main()
