"""The ``arb`` command: a group whose commands come from the registry and are imported when they are invoked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from arb_ternary import API_VERSION, __version__
from arb_ternary.cli.options import plugin_files
from arb_ternary.errors import ArbError, ComponentError, EnvironmentProblem, render
from arb_ternary.plugins.api_version import spelled
from arb_ternary.plugins.manager import manager
from arb_ternary.plugins.registry import Registered

__all__ = ["arb", "main"]

INTERRUPTED = 130


class RegistryGroup(click.Group):
    """A click group over the registered commands. Its help shows their summaries and imports none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the registered commands, sorted."""
        return list(manager().registry.names("command"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None when the name is not registered."""
        registered = manager().registry.find("command", cmd_name)
        return None if registered is None else _import_command(registered)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, but an unknown name is explained by the registry: nearest name, or what to install."""
        if args and not args[0].startswith("-") and not ctx.resilient_parsing:
            manager().registry.get("command", args[0])
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The section "Commands", from the specs."""
        commands = manager().registry.all("command")
        with formatter.section("Commands"):
            formatter.write_dl([(command.name, command.spec.summary) for command in commands])


@click.group(cls=RegistryGroup, context_settings={"help_option_names": ["-h", "--help"]})
@plugin_files
@click.version_option(__version__, prog_name="arb", message=f"%(prog)s %(version)s (plugins {spelled(API_VERSION)})")
def arb() -> None:
    """Train, convert and ship pure-ternary neural networks."""
    from arb_ternary.cli.log import log_to_standard_error

    log_to_standard_error()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``arb`` and return its exit code: 0 ok, 1 failure, 2 usage or config, 3 environment, 130 interrupted.

    Args:
        arguments: the command line without the program's name; None takes it from ``sys.argv``.
    """
    try:
        result: Any = arb.main(
            args=None if arguments is None else list(arguments), prog_name="arb", standalone_mode=False
        )
    except ArbError as error:
        click.echo(render(error), err=True)
        return error.exit_code
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort as stop:
        # click makes one of an interrupt, of an end of input in a prompt, and of a "no" to a question
        if isinstance(stop.__cause__ or stop.__context__, KeyboardInterrupt):
            return _interrupted()
        click.echo("aborted", err=True)
        return 1
    except KeyboardInterrupt:
        return _interrupted()
    return result if isinstance(result, int) and not isinstance(result, bool) else 0


def _interrupted() -> int:
    click.echo("interrupted", err=True)
    return INTERRUPTED


def _import_command(registered: Registered) -> click.Command:
    described = f"command {registered.name!r} of plugin {manager().registry.record_of(registered).described}"
    try:
        command = registered.load()
    except ArbError:
        raise
    except (ImportError, AttributeError) as error:
        raise EnvironmentProblem(f"{described} cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(command, click.Command):
        raise ComponentError(f"{described}: {registered.spec.target} is {command!r}, which is not a click command")
    return command


if __name__ == "__main__":
    sys.exit(main())
