"""Groups of commands that come from the registry and are imported when they are invoked."""

from __future__ import annotations

from typing import Any

import click

from arb_ternary.errors import ComponentError, EnvironmentProblem
from arb_ternary.plugins.manager import manager
from arb_ternary.plugins.record import Registered


class RegistryGroup(click.Group):
    """A click group of registered commands. Its help shows their summaries and imports none.

    Args:
        prefix: the prefix of the names of its commands in the registry, with the dot at the end:
            ``plugins.``. It is empty for ``arb`` itself, whose commands have names without a dot.
        attributes: as for ``click.Group``.
    """

    def __init__(self, *, prefix: str = "", **attributes: Any) -> None:
        super().__init__(**attributes)
        self.prefix = prefix

    def registered(self) -> dict[str, Registered]:
        """The registered commands of this group by name, sorted."""
        commands = {}
        for found in manager().registry.all("command"):
            name = found.name.removeprefix(self.prefix)
            if found.name.startswith(self.prefix) and "." not in name:
                commands[name] = found
        return commands

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands, sorted."""
        return list(self.registered())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command; None if there is none of that name."""
        # Not imported for --help: it takes time.
        from arb_ternary.cli.numbers import limit_numbers

        registered = self.registered().get(cmd_name)
        return None if registered is None else limit_numbers(_import_command(registered))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command as click does, but let the registry explain an unknown name."""
        if args and not args[0].startswith("-") and not ctx.resilient_parsing:
            manager().registry.get("command", f"{self.prefix}{args[0]}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the section "Commands", from the specs."""
        commands = self.registered()
        rows = [(name, found.spec.summary) for name, found in commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _import_command(found: Registered) -> click.Command:
    """Import a command; errors name its plugin."""
    try:
        command = found.load()
    except (ImportError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise EnvironmentProblem(f"{found.described} cannot be imported: {reason}") from error
    if not isinstance(command, click.Command):
        raise ComponentError(
            f"{found.described}: {found.spec.target} is {command!r}, which is not a click command"
        )
    return command


config = RegistryGroup(
    name="config", prefix="config.", help="Write, check and explain config files."
)
plugins = RegistryGroup(
    name="plugins", prefix="plugins.", help="List, inspect, check and write plugins."
)
backends = RegistryGroup(
    name="backends", prefix="backends.", help="List the kernel backends and explain the choice."
)
