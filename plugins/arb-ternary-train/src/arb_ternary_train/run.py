"""Train from Python: ``run = arb_ternary.train("arb.yaml")``, in scripts and notebooks."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from attrs import frozen
from torch import nn

import arb_ternary
from arb_ternary.config.fields import to_plain
from arb_ternary.config.loading import read_document
from arb_ternary.config.overrides import apply_overrides
from arb_ternary.config.yaml_document import Document, LoadedConfig, dump_inline
from arb_ternary_train.config import RunConfig
from arb_ternary_train.directory import RunDirectory
from arb_ternary_train.loading import load_document
from arb_ternary_train.metrics import metric_names, read_metrics
from arb_ternary_train.model_source import open_model
from arb_ternary_train.plot import draw_curves, read_curves
from arb_ternary_train.runner import RunRequest
from arb_ternary_train.runner import train as train_config


@frozen
class Curves:
    """A figure that notebooks show.

    Attributes:
        figure: the ``matplotlib.figure.Figure``.
    """

    figure: Any

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, whose ending chooses the format (PNG, SVG, PDF)."""
        self.figure.savefig(path)

    def _repr_png_(self) -> bytes:
        written = io.BytesIO()
        self.figure.savefig(written, format="png")
        return written.getvalue()


class Run:
    """A run in its directory: what it measured, its weights, and how it goes on.

    Args:
        directory: the run's directory.

    Raises:
        UsageProblem: there is no run.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._files = RunDirectory.existing(Path(directory))

    def __repr__(self) -> str:
        return f"Run({str(self.directory)!r})"

    @property
    def directory(self) -> Path:
        """The run's directory."""
        return self._files.path

    @property
    def config(self) -> dict[str, Any]:
        """The config as plain values, with all defaults."""
        loaded = _load(self._files.config_file, {})
        plain: dict[str, Any] = to_plain(loaded.config)
        return plain

    @property
    def metrics(self) -> Any:
        """All numbers of steps and evaluations: a pandas table, or columns if pandas is missing.

        Columns are ``event`` (``train`` or ``validation``), ``step`` and each number that was
        recorded; where a record lacks a number, there is None (NaN in the table).

        Raises:
            ArbError: the metrics file is damaged.
        """
        records = [
            record
            for record in read_metrics(self._files.metrics_file)
            if record.get("event") in ("train", "validation")
        ]
        columns: dict[str, list[Any]] = {}
        for name in ("event", "step", *metric_names(records)):
            columns[name] = [record.get(name) for record in records]
        if find_spec("pandas") is None:
            return columns
        import pandas

        return pandas.DataFrame(columns)

    def plot(self, *others: Run, metric: str = "loss") -> Curves:
        """Draw a number over the steps, beside that of other runs, as ``arb plot`` does.

        Raises:
            ArbError: a run has no step yet, or no number of this name.
        """
        curves = [
            read_curves(run._files, read_metrics(run._files.metrics_file), index, metric)
            for index, run in enumerate((self, *others))
        ]
        return Curves(draw_curves(curves, metric))

    def model(self, *, device: str | None = None, backend: str | None = None) -> nn.Module:
        """Load the newest checkpoint's model, in evaluation mode.

        Raises:
            ArbError: there is no checkpoint, or it is damaged.
        """
        return open_model(self.directory, device=device, backend=backend).module

    def generate(self, prompt: Any, **options: Any) -> str:
        """Continue a text, or answer a conversation, with the newest checkpoint.

        The arguments are those of ``arb_ternary.load_model(...).generate``, which the package
        ``arb-ternary-chat`` brings.

        Raises:
            ImportError: that package is not installed.
            ArbError: the run's model does not write text.
        """
        text: str = arb_ternary.load_model(self.directory).generate(prompt, **options)
        return text

    def resume(self, overrides: Mapping[str, Any] | None = None, **values: Any) -> Run:
        """Continue the run from its newest good checkpoint; see :func:`train` for the arguments."""
        loaded = _load(self._files.config_file, {**(overrides or {}), **values})
        train_config(loaded.config, RunRequest(directory=self.directory, resume="auto"))
        return self


def train(
    config: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    init_from: str | os.PathLike[str] | None = None,
    **values: Any,
) -> Run:
    """Train as ``arb train`` does, and return the run.

    Args:
        config: a YAML file, or its content as plain values.
        overrides: other values of the config by path, ``{"phases.0.steps": 10}``.
        run_dir: where to write; None = ``runs/NAME``, made unique.
        init_from: a run whose weights it starts from.
        values: other values of top-level keys, ``seed=1``.

    Raises:
        ConfigError: the config is wrong; every fault is listed.
        Interrupted: Ctrl-C or SIGTERM came. A checkpoint has been saved: ``Run(...).resume()``.
        ArbError: anything else that the user can act on. A failed check does not raise.
    """
    loaded = _load(config, {**(overrides or {}), **values})
    request = RunRequest(
        directory=None if run_dir is None else Path(run_dir),
        init_from=None if init_from is None else Path(init_from),
    )
    return Run(train_config(loaded.config, request).directory)


def _load(
    config: str | os.PathLike[str] | Mapping[str, Any], values: Mapping[str, Any]
) -> LoadedConfig[RunConfig]:
    folder = Path.cwd()
    if isinstance(config, Mapping):
        document = Document(dict(config), "the given config")
    else:
        document = read_document(config)
        folder = Path(config).parent
    written = [f"{path}={dump_inline(value)}" for path, value in values.items()]
    return load_document(apply_overrides(document, written), folder)
