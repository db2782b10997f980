"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import click
from click.shell_completion import CompletionItem

from arb_ternary.errors import EnvironmentProblem, UsageProblem
from arb_ternary.hookspecs import arb_register_documents
from arb_ternary.plugins.discovery import USUAL_PARTS, install_command
from arb_ternary.plugins.manager import manager
from arb_ternary.specs import DocumentSpec

#: Completes the value of an option or an argument.
Completion: TypeAlias = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

#: The kind of config file that is meant if several are installed and none is named.
_USUAL = "run"


def completes(kind: str) -> Completion:
    """Return what completes the names of the components of a kind in a shell."""

    def complete(
        _context: click.Context, _parameter: click.Parameter, begun: str
    ) -> list[CompletionItem]:
        return [
            CompletionItem(found.name, help=found.spec.summary)
            for found in manager().registry.all(kind)
            if found.name.startswith(begun)
        ]

    return complete


def _load_files(
    _context: click.Context, _parameter: click.Parameter, files: tuple[str, ...]
) -> None:
    for file in files:
        manager().load_file(file)


#: ``--plugin FILE``, any number of times; nothing reaches the command. It is eager, so that the
#: components of the files exist when the other arguments of the command are read.
plugin_files = click.option(
    "--plugin",
    metavar="FILE",
    multiple=True,
    is_eager=True,
    expose_value=False,
    callback=_load_files,
    help="Load a plugin from a Python file. Can be repeated.",
)

#: ``--json``: the command gets ``as_json: bool`` and prints one JSON document instead of text.
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")

#: ``--device NAME``, for questions about a device.
device = click.option(
    "--device", default="cpu", show_default=True, help="Device to ask about, e.g. cpu, cuda:0, mps."
)

#: ``-o path=value``, any number of times: the command gets ``overrides: tuple[str, ...]`` for
#: loading a config.
overrides = click.option(
    "-o",
    "--override",
    "overrides",
    metavar="PATH=VALUE",
    multiple=True,
    help="Change a setting, e.g. -o phases.0.steps=10. Can be repeated.",
)

#: ``--document NAME``: the command gets ``document: str | None`` for :func:`document_called`.
document_name = click.option(
    "--document", metavar="NAME", help=f"Kind of config file; default: the only one, or {_USUAL}."
)


def document_called(name: str | None) -> DocumentSpec:
    """Return the kind of config file of that name.

    None means the only kind that is installed, or the usual one of several.

    Raises:
        UsageProblem: there is none of that name, or one of several has to be named.
        EnvironmentProblem: none is installed.
    """
    registry = manager().registry
    documents: dict[str, DocumentSpec] = registry.by_name(arb_register_documents.__name__)
    if name is None and _USUAL not in documents:
        problem = registry.missing("document", "kind of config file", _USUAL, documents)
        if isinstance(problem, EnvironmentProblem):
            # The usual kind is not installed or failed to load: the file is not of another kind.
            raise problem
    if not documents:
        raise EnvironmentProblem(
            "no kind of config file is installed", hint=install_command(USUAL_PARTS)
        )
    if name is None and len(documents) == 1:
        return next(iter(documents.values()))
    if name is None and _USUAL not in documents:
        raise UsageProblem(f"--document: name the kind of config file: {', '.join(documents)}")
    wanted = name or _USUAL
    if wanted not in documents:
        raise registry.missing("document", "kind of config file", wanted, documents)
    return documents[wanted]
