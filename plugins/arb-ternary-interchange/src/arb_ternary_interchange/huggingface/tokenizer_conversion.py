"""Tokenizers of other files, of which transformers makes a ``tokenizer.json``.

The files may come from anybody, and transformers need not end on them. So it runs in a process of
its own, this module as a program, which is ended when it takes too long.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from attrs import frozen

from arb_ternary.environment import for_child
from arb_ternary.errors import DataError, EnvironmentProblem
from arb_ternary.plugins.discovery import install_command

#: Longest time of a conversion; transformers alone takes some seconds to import.
_SECONDS: Final = 300.0
#: Most memory of the process, in bytes.
_MEMORY: Final = 8 << 30
_ANSWER: Final = "answer.json"

#: What makes a ``tokenizer.json`` of any other files.
SAVE_AGAIN: Final = (
    "Make a tokenizer.json where transformers can read it: "
    "`AutoTokenizer.from_pretrained(folder).save_pretrained(folder)`."
)


@frozen
class ConvertedTokenizer:
    """Tokenizer that transformers made of a folder.

    Attributes:
        definition: the text of a ``tokenizer.json``.
        special: texts of special tokens by role, such as ``eos_token``.
    """

    definition: str
    special: Mapping[str, str]


def convert_tokenizer(folder: Path, reason: str) -> ConvertedTokenizer:
    """Return what transformers' ``AutoTokenizer`` makes of a folder.

    Args:
        folder: the folder.
        reason: why its files are not read directly; errors begin with it.

    Raises:
        DataError: transformers cannot read them.
        EnvironmentProblem: transformers is not installed.
    """
    if find_spec("transformers") is None:
        raise EnvironmentProblem(
            f"{reason}: that needs the package `transformers`, which is not installed",
            f"{install_command('arb-ternary-interchange[transformers]')}\n{SAVE_AGAIN}",
        )
    with TemporaryDirectory() as name:
        answer = Path(name, _ANSWER)
        try:
            _run(folder, answer)
        except subprocess.TimeoutExpired:
            raise DataError(f"{reason}: transformers did not end in {_SECONDS:g} seconds") from None
        found: dict[str, Any] = {"error": "its process has failed"}
        if answer.is_file():
            found = json.loads(answer.read_bytes())
    if "error" in found:
        raise DataError(f"{reason}: transformers cannot do that: {found['error']}", SAVE_AGAIN)
    return ConvertedTokenizer(found["definition"], found["special"])


def _run(folder: Path, answer: Path) -> None:
    subprocess.run(
        [sys.executable, "-P", "-m", __name__, str(folder.absolute()), str(answer)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=for_child(HF_HUB_OFFLINE="1"),
        timeout=_SECONDS,
        check=False,
    )


def _convert(folder: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    named = tokenizer.special_tokens_map.items()
    special = {role: text for role, text in named if isinstance(text, str)}
    return {"definition": tokenizer.backend_tokenizer.to_str(), "special": special}


def write_answer(folder: Path, answer: Path) -> None:
    """Write what transformers makes of a folder into the file ``answer``."""
    try:
        found = _convert(folder)
    except BaseException as error:  # the package tokenizers panics, which is no Exception
        lines = str(error).splitlines() or [""]
        found = {"error": f"{type(error).__name__}: {lines[0][:300]}"}
    answer.write_text(json.dumps(found))


if __name__ == "__main__":
    with suppress(ValueError, OSError):  # macOS refuses it
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    # Tokenizers need no torch, which would take most of the time.
    sys.modules["torch"] = None  # type: ignore[assignment]
    write_answer(Path(sys.argv[1]), Path(sys.argv[2]))
