"""Run a study: ``python -m arb_ternary_bench.study NAME``.

A study is a measurement that is made now and then and has its result on a page. It is a module of
:mod:`arb_ternary_bench.studies` that states its options, what is measured, and how that is shown.
This module does the rest: arguments, folders, result files, tables and figures. Training runs of a
study are processes of :mod:`arb_ternary_bench.runs`.
"""

from __future__ import annotations

import json
import pkgutil
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from attrs import field, frozen

from arb_ternary.cli.options import as_json, overrides, plugin_files
from arb_ternary.config.fields import to_plain
from arb_ternary.config.loading import read_document
from arb_ternary.config.overrides import apply_overrides
from arb_ternary.config.structure import structure
from arb_ternary.config.yaml_document import Document
from arb_ternary.errors import ArbError, UsageProblem, nearest, render
from arb_ternary.plugins.manager import manager
from arb_ternary_bench import studies
from arb_ternary_bench.table import Record, ResultTable

Say = Callable[[str], None]
Draw = Callable[[Record, Path], None]


@frozen
class Session:
    """The arguments that the runner gives to a study.

    Attributes:
        folder: where everything of the study goes; made when it is needed.
        say: is called with progress.
    """

    folder: Path
    say: Say = lambda _: None


@frozen(kw_only=True)
class Study:
    """A study.

    Attributes:
        options: the class of its options, which are the grid; made of the keys of a config file.
        run: measures; returns plain values, the content of ``result.json``.
        table: how the result is shown.
        figures: what draws each figure, by the name of its file.
    """

    options: type[Any]
    run: Callable[[Any, Session], dict[str, Any]]
    table: ResultTable
    figures: Mapping[str, Draw] = field(factory=dict)

    def finish(self, result: Record, folder: Path) -> None:
        """Write result, table and figures to a folder."""
        self.table.write(result, folder)
        for name, draw in self.figures.items():
            draw(result, folder / name)


def study_names() -> list[str]:
    """Return the names of all studies."""
    return sorted(module.name for module in pkgutil.iter_modules(studies.__path__))


def find_study(name: str) -> Study:
    """Return the study of a name.

    Raises:
        UsageProblem: there is none.
    """
    names = study_names()
    if name not in names:
        close = nearest(name, names)
        suggestion = f"did you mean {close!r}? " if close else ""
        raise UsageProblem(
            f"no study is called {name!r}", f"{suggestion}studies: {', '.join(names)}"
        )
    study: Study = import_module(f"{studies.__name__}.{name}").STUDY
    return study


def load_options(study: Study, file: Path | None, changes: tuple[str, ...]) -> Any:
    """Return the options of a study, from a config file and ``path=value`` overrides.

    Raises:
        ConfigError: a key or a value is wrong.
    """
    document = Document({}, "the study's options") if file is None else read_document(file)
    return structure(study.options, apply_overrides(document, changes), manager().registry)


@click.command()
@click.argument("name", metavar="NAME")
@click.argument(
    "config", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@plugin_files
@overrides
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="The study's folder; default: runs/NAME.",
)
@click.option(
    "--from",
    "earlier",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Measure nothing: show the result in this JSON file.",
)
@as_json
def main(
    name: str,
    config: Path | None,
    overrides: tuple[str, ...],
    out: Path | None,
    earlier: Path | None,
    as_json: bool,
) -> None:
    """Run the study NAME with the options of CONFIG, a YAML file.

    The result, its table and its figures are written to the study's folder. A study whose training
    runs were stopped or killed continues when the same command is given again; finished runs are
    not repeated.
    """
    study = find_study(name)
    folder = out or Path("runs") / name
    if earlier is not None:
        result = json.loads(earlier.read_text(encoding="utf-8"))
    else:
        options = load_options(study, config, overrides)
        session = Session(folder, lambda line: click.echo(line, err=True))
        result = {"study": name, "options": to_plain(options), **study.run(options, session)}
    study.finish(result, folder)
    study.table.show(result, as_json=as_json)
    click.echo(f"{folder}: {', '.join(('result.json', 'table.md', *study.figures))}", err=True)


if __name__ == "__main__":
    try:
        main(prog_name="python -m arb_ternary_bench.study")
    except ArbError as problem:
        click.echo(render(problem), err=True)
        sys.exit(problem.exit_code)
