"""``arb generate``: sample from a model, with the generator for such models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from arb_ternary.cli.options import completes
from arb_ternary.errors import UsageProblem
from arb_ternary.plugins.manager import manager

if TYPE_CHECKING:
    from arb_ternary.plugins.record import Registered
    from arb_ternary_train.config import RunConfig


class Handover(click.Command):
    """A command that takes the options of the generator for the model among its arguments."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the arguments, ``--help`` too, for the generator."""
        from arb_ternary_train.model_source import find_run, is_address
        from arb_ternary_train.model_state import run_of

        if ctx.resilient_parsing:  # a shell completes a line
            return []
        named, rest = _taken_out(args, "--with")
        run = next((each for each in rest if run_of(Path(each)) is not None), None)
        if run is None:
            # The generator reads the other model. Its own options are not known here, so that any
            # argument may be the model if options come first.
            likely = rest if not rest or rest[0].startswith("-") else rest[:1]
            if not any(is_address(each) or os.path.lexists(each) for each in likely):
                if not rest or "--help" in rest:
                    click.echo(ctx.get_help())
                    ctx.exit()
                find_run(likely[-1])
        ctx.params = {"source": run, "named": named, "arguments": rest}
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


def generator_for(config: RunConfig | None) -> Registered:
    """Return the generator for runs of ``config``: the most specific one that suits it.

    None stands for a model that is no run. Generators that name no component suit it.

    Raises:
        UsageProblem: there is none, or two are equally specific.
    """
    model = masking = data = None
    described = "a model that is no run"
    if config is not None:
        model, masking, data = config.model.name, config.masking.name, config.data.name
        described = f"the model {model!r}"
    # Generators that suit the model, by how many of its parts they name.
    suited: dict[int, list[Registered]] = {}
    for found in manager().registry.all("generator"):
        spec: Any = found.spec
        wanted = (
            (spec.models, model),
            (spec.masking, masking),
            (spec.data, data),
        )
        named = [name in names for names, name in wanted if names]
        if all(named):
            suited.setdefault(len(named), []).append(found)
    if not suited:
        raise UsageProblem(
            f"generate: nothing that is installed draws from {described}",
            f"Generators are: {', '.join(_names()) or 'none'}. --with NAME takes one all the same.",
        )
    best = suited[max(suited)]
    if len(best) > 1:
        names = ", ".join(found.name for found in best)
        raise UsageProblem(f"generate: several draw from {described}: {names}", "--with NAME.")
    return best[0]


@click.command(cls=Handover)
@click.argument("source", type=click.Path())
@click.option(
    "--with",
    "named",
    metavar="NAME",
    shell_complete=completes("generator"),
    help="Generator; default: the one for such models.",
)
@click.pass_context
def generate(
    ctx: click.Context, source: str | None, named: str | None, arguments: list[str]
) -> None:
    """Sample from the model of SOURCE: text, pictures, sounds.

    SOURCE is a run, a checkpoint, a GGUF file, a Hugging Face folder, or hf://org/name. Options
    depend on the model: `arb generate SOURCE --help` shows those for SOURCE.
    """
    from arb_ternary.cli.numbers import limit_numbers
    from arb_ternary_train.loading import load_config
    from arb_ternary_train.model_state import run_of

    directory = None if source is None else run_of(Path(source))
    config = None if directory is None else load_config(directory.config_file).config
    found = generator_for(config) if named is None else manager().registry.get("generator", named)
    command = limit_numbers(found.load())
    command.main(arguments, prog_name=f"{ctx.command_path}", standalone_mode=False)
