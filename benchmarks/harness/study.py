"""A script whose options are a class: ``python benchmarks/NAME.py [CONFIG.yaml] [-o KEY=VALUE]``.

For long measurements of many training runs, whose grid is worth a file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from attrs import frozen

from arb_ternary.cli.options import as_json, overrides
from arb_ternary.config.fields import to_plain
from arb_ternary.config.loading import read_document
from arb_ternary.config.overrides import apply_overrides
from arb_ternary.config.structure import structure
from arb_ternary.config.yaml_document import Document
from arb_ternary.plugins.manager import manager
from harness.script import finish, out
from harness.table import ResultTable


@frozen(kw_only=True)
class Study:
    """A study.

    Attributes:
        name: of its folder.
        options: the class of its options, made of the keys of a config file.
        run: measures in a folder; returns plain values, the content of ``result.json``.
        table: how the result is shown.
    """

    name: str
    options: type[Any]
    run: Callable[[Any, Path], dict[str, Any]]
    table: ResultTable

    def load_options(self, file: Path | None, changes: tuple[str, ...] = ()) -> Any:
        """Return the options, from a config file and ``path=value`` overrides.

        Raises:
            ConfigError: a key or a value is wrong.
        """
        document = Document({}, "the options") if file is None else read_document(file)
        return structure(self.options, apply_overrides(document, changes), manager().registry)

    def command(self) -> click.Command:
        """Return the command line of the script."""

        @click.command()
        @click.argument(
            "config", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path)
        )
        @overrides
        @out
        @as_json
        def run(
            config: Path | None,
            overrides: tuple[str, ...],
            out: Path | None,
            as_json: bool,
        ) -> None:
            """Measure with the options of CONFIG, a YAML file, and write the result to --out.

            Training runs that were stopped continue when the same command is given again.
            """
            folder = out or Path("runs") / self.name
            options = self.load_options(config, overrides)
            result = {"options": to_plain(options), **self.run(options, folder)}
            finish(result, self.table, folder, as_json=as_json)

        return run
