"""Shells complete commands and the names of components."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ARB = Path(sys.executable).with_name("arb")

BASH = """
eval "$(_ARB_COMPLETE=bash_source arb)"
complete -p arb >/dev/null || exit 1
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_arb_completion arb
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(shell: str, words: str) -> list[str]:
    path = f"{ARB.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    if shell == "bash":
        # The last word is what the user has begun to write; it may be empty.
        command = ["bash", "--norc", "-c", BASH.format(words=words)]
    else:
        words = words.replace('""', "")
        count = len(words.split()) - (not words.endswith(" "))
        environment |= {"_ARB_COMPLETE": "zsh_complete", "COMP_WORDS": words}
        environment["COMP_CWORD"] = str(count)
        command = [str(ARB)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("arb conf", "config"),
        ('arb backends explain --backend ""', "torch"),
        ('arb config new --template ""', None),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_names(shell: str, words: str, expected: str | None) -> None:
    if shell == "bash" and shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    found = completed(shell, words)
    if expected is not None:
        assert expected in found
    assert not any("Traceback" in line for line in found)


def test_zsh_gets_a_script() -> None:
    environment = {**os.environ, "_ARB_COMPLETE": "zsh_source"}
    script = subprocess.run(
        [str(ARB)], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert "#compdef arb" in script
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n"], input=script, text=True, check=True)


def test_components_complete_with_what_they_are(install_plugin) -> None:
    from arb_ternary.cli.main import arb
    from arb_ternary.cli.options import completes

    install_plugin(
        "fast",
        """
from arb_ternary import hookimpl
from arb_ternary.specs import BackendSpec
ARB_API_VERSION = (1, 0)

@hookimpl
def arb_register_backends():
    return [BackendSpec(name="fast", target="no:build", probe="no:probe", summary="a fast one")]
""",
    )
    with arb.make_context("arb", [], resilient_parsing=True) as context:
        found = completes("backend")(context, None, "f")  # type: ignore[arg-type]
    assert [(item.value, item.help) for item in found] == [("fast", "a fast one")]
