"""The tutorial notebook is executed, in fewer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "tutorial" / "notebook.ipynb"


def outputs_of(cell: Any) -> dict[str, str]:
    """Return what a cell shows, by media type; printed text is ``text/plain`` too."""
    shown: dict[str, str] = {}
    for output in cell["outputs"]:
        if output["output_type"] == "stream":
            shown["text/plain"] = shown.get("text/plain", "") + output["text"]
        else:
            shown |= output["data"]
    return shown


def test_the_notebook_is_kept_without_outputs() -> None:
    nbformat = pytest.importorskip("nbformat")
    cells = nbformat.read(FILE, as_version=4)["cells"]
    for cell in cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    text = FILE.read_text(encoding="utf-8")
    assert '\\"steps\\": 200' in text
    text = text.replace('\\"steps\\": 200', '\\"steps\\": 20')
    notebook = nbformat.reads(text, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()

    shown = [outputs_of(cell) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    trained, table, curve, written, compared, audited = shown
    assert "runs/notebook" in trained["text/plain"]
    assert "validation" in table["text/plain"]
    assert "ROMEO:" not in written["text/plain"]  # the continuation alone
    assert len(written["text/plain"]) > 100
    for picture in (curve, compared):
        assert picture["image/png"].startswith("iVBORw0KGgo")  # base64 of a PNG's first bytes
    assert "bits" in audited["text/plain"]
    assert not any("Traceback" in str(each) for each in shown)
