"""``arb generate``: sample from a run's model, with the generator for such models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from arb_ternary.errors import UsageProblem
from arb_ternary.plugins.manager import manager

if TYPE_CHECKING:
    from arb_ternary.plugins.record import Registered
    from arb_ternary_train.config import RunConfig


class Handover(click.Command):
    """A command that takes the options of the generator for the run among its arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the arguments, ``--help`` too, for the generator."""
        from arb_ternary_train.model_state import run_of

        named, rest = _taken_out(args, "--with")
        run = next((each for each in rest if run_of(Path(each)) is not None), None)
        if run is None:
            if not rest or "--help" in rest:
                click.echo(ctx.get_help())
                ctx.exit()
            # The last argument is most likely meant as the run; its error says what a run
            # directory is.
            run = rest[-1]
        ctx.params = {"run": Path(run), "named": named, "arguments": rest}
        return []

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of this command, and the generators that have more."""
        super().format_options(ctx, formatter)
        with formatter.section("Generators"):
            formatter.write_dl(
                [(found.name, found.spec.summary) for found in manager().registry.all("generator")]
            )


def _taken_out(args: list[str], option: str) -> tuple[str | None, list[str]]:
    """Return the value of ``option`` among ``args``, and the other arguments."""
    value = None
    rest = []
    left = iter(args)
    for each in left:
        if each == option or each.startswith(f"{option}="):
            value = each.partition("=")[2] if "=" in each else next(left, None)
            if value is None:
                raise UsageProblem(f"{option}: name a generator after it: {', '.join(_names())}")
        else:
            rest.append(each)
    return value, rest


def _names() -> tuple[str, ...]:
    return manager().registry.names("generator")


def generator_for(config: RunConfig) -> Registered:
    """Return the generator for runs of ``config``: the most specific one that suits it.

    Raises:
        UsageProblem: there is none, or two are equally specific.
    """
    # Generators that suit the run, by how many of its parts they name.
    suited: dict[int, list[Registered]] = {}
    for found in manager().registry.all("generator"):
        spec: Any = found.spec
        wanted = (
            (spec.models, config.model.name),
            (spec.masking, config.masking.name),
            (spec.data, config.data.name),
        )
        named = [name in names for names, name in wanted if names]
        if all(named):
            suited.setdefault(len(named), []).append(found)
    if not suited:
        raise UsageProblem(
            f"generate: nothing that is installed draws from the model {config.model.name!r}",
            f"Generators are: {', '.join(_names()) or 'none'}. --with NAME takes one all the same.",
        )
    best = suited[max(suited)]
    if len(best) > 1:
        names = ", ".join(found.name for found in best)
        raise UsageProblem(
            f"generate: several draw from the model {config.model.name!r}: {names}", "--with NAME."
        )
    return best[0]


@click.command(cls=Handover)
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--with", "named", metavar="NAME", help="Generator; default: the one for such models."
)
@click.pass_context
def generate(ctx: click.Context, run: Path, named: str | None, arguments: list[str]) -> None:
    """Sample from the model of RUN (a run directory or a checkpoint): text, pictures, sounds.

    Options depend on the model: `arb generate RUN --help` shows those for RUN.
    """
    from arb_ternary.cli.numbers import limit_numbers
    from arb_ternary_train.directory import RunDirectory
    from arb_ternary_train.loading import load_config
    from arb_ternary_train.model_state import run_of

    directory = run_of(run) or RunDirectory.existing(run)
    config = load_config(directory.config_file).config
    found = generator_for(config) if named is None else manager().registry.get("generator", named)
    command = limit_numbers(found.load())
    command.main(arguments, prog_name=f"{ctx.command_path}", standalone_mode=False)
