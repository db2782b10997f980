"""Shells complete the files and folders that commands of any distribution take."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from arb_ternary.plugins.manager import manager

#: Names of arguments that are a file or a folder, or an address instead.
PLACES = {
    *("config", "conversations", "data", "destination", "files", "manifest", "model", "path"),
    *("run", "runs", "source", "sources"),
}


def arguments(path: str, command: click.Command) -> Iterator[tuple[str, click.Argument]]:
    """Yield the arguments of a command and of those below it that are files or folders."""
    for parameter in command.params:
        if isinstance(parameter, click.Argument) and parameter.name in PLACES:
            yield f"{path} {parameter.name}", parameter
    for name, nested in getattr(command, "commands", {}).items():
        yield from arguments(f"{path} {name}", nested)


def found() -> dict[str, click.Argument]:
    registry = manager().registry
    commands = [(each.name, each.load()) for each in registry.all("command")]
    commands += [(f"generate {each.name}", each.load()) for each in registry.all("generator")]
    return dict(pair for name, command in commands for pair in arguments(name, command))


FOUND = found()


def test_the_commands_are_looked_at() -> None:
    assert {"chat source", "generate source", "export source", "train config"} <= FOUND.keys()


@pytest.mark.parametrize("name", FOUND)
def test_a_place_is_completed_as_files_are(name: str) -> None:
    argument = FOUND[name]
    context = click.Context(click.Command("arb"))
    items = argument.shell_complete(context, "mod")
    assert [(item.value, item.type) for item in items] == [("mod", "file")]
    # An address is taken as it is.
    assert str(argument.type.convert("hf://org/name", argument, context)) in (
        "hf://org/name",
        "hf:/org/name",
    )
