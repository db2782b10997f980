"""``arb`` with an output that is closed, full, without a reader, or in another encoding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ARB = f"{sys.executable} -m arb_ternary"
LIST = f"{ARB} backends list"


def shell(command: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        check=False,
        timeout=120,
        env=os.environ | variables,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_output_is_named() -> None:
    done = shell(f"{LIST} > /dev/full")
    assert done.stderr == b"error: standard output: No space left on device\n"
    assert done.returncode == 1


def test_a_closed_output_ends_as_cat_does() -> None:
    done = shell(f"{LIST} >&-")
    assert done.stderr == b"error: standard output: Bad file descriptor\n"
    assert done.returncode == 1


def test_a_reader_that_has_gone_ends_it_in_silence() -> None:
    # The shell reports cat's end by SIGPIPE as 141, too.
    done = shell(f"set -o pipefail; {LIST} | true; exit ${{PIPESTATUS[0]}}")
    assert done.stderr == b""
    assert done.returncode in (0, 141)  # 0 if it had written before the reader went


def test_without_a_standard_error_the_command_works() -> None:
    done = shell(f"{LIST} 2>&-")
    assert b"torch" in done.stdout
    assert done.returncode == 0


# click writes UTF-8 to a terminal of ASCII.
@pytest.mark.parametrize(
    ("encoding", "name"), [("ascii", "snow\N{SNOWMAN}".encode()), ("cp1252", b"snow\\u2603")]
)
def test_a_character_that_the_encoding_lacks_is_escaped(
    encoding: str, name: bytes, tmp_path: Path
) -> None:
    missing = tmp_path / "snow\N{SNOWMAN}.py"
    done = shell(f"{ARB} --plugin {missing} backends list", PYTHONIOENCODING=encoding)
    assert name in done.stderr
    assert b"Traceback" not in done.stderr
    assert done.returncode == 2


def test_a_plugin_that_closes_the_output_is_named(tmp_path: Path) -> None:
    plugin = tmp_path / "closing.py"
    plugin.write_text("import sys\nsys.stdout.close()\n")
    done = shell(f"{ARB} --plugin {plugin} backends list")
    assert done.stderr.decode() == (
        f"error: plugin file {plugin} failed: it closes standard output\n"
    )
    assert done.returncode == 3


def test_an_output_that_was_closed_is_an_error() -> None:
    done = shell(
        f"""{sys.executable} -c 'import sys
from arb_ternary.cli import main
main.prepare_streams = lambda: sys.stdout.close()
sys.exit(main.main(["backends", "list"]))'"""
    )
    assert done.stderr == b"error: standard output is closed\n"
    assert done.returncode == 1
