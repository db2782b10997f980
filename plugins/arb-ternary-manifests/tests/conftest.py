"""Manifests with one target that trains a tiny decoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

#: A decoder with ternary linears; embedding, head and norms are float.
SYSTEM = (
    "{ref: system.language_model, config: {width: 16, layers: 1, heads: 2, max_length: 512, "
    "group_size: 32, float_parts: [embedding, head, norms]}}"
)
HEAD = f"""version: 2
name: study
vars: {{small: 2}}
targets:
  - name: one
    system: {SYSTEM}
    config: {{data: {{name: text, path: text.txt}}}}
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a text."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be or not to be, that is the question. " * 60)


@pytest.fixture
def written() -> Callable[..., Path]:
    """Writes a manifest; ``runs`` begins with the target's trainer or runs."""

    def write(runs: str, head: str = HEAD) -> Path:
        path = Path("study.yaml")
        head = head.replace("SYSTEM", SYSTEM)
        path.write_text(head + "".join(f"    {line}\n" for line in runs.strip("\n").splitlines()))
        return path

    return write
