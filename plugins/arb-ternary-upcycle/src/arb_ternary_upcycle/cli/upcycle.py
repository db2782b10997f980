"""``arb upcycle``: make a pretrained model ternary without writing a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from arb_ternary.cli.options import as_json, overrides, plugin_files
from arb_ternary.cli.output import print_notes
from arb_ternary_train.openmp import wait_passively
from arb_ternary_upcycle.cli.inspect import inspect

#: Config and run in the folder of ``--out``.
CONFIG = "config.yaml"
RUN = "run"


class _RunsByDefault(click.Group):
    """``arb upcycle MODEL`` is ``arb upcycle run MODEL``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command of the group, or ``run`` for any other name, which is a model's."""
        return super().get_command(ctx, cmd_name) or self.commands["run"]


@click.group(cls=_RunsByDefault)
def upcycle() -> None:
    """Make a pretrained model ternary: `arb upcycle MODEL --out DIR`."""


upcycle.add_command(inspect)


@upcycle.command("run")
@click.argument("model", type=click.Path())
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    help="Folder for the config and the run.",
)
@click.option(
    "--preset",
    type=click.Choice(["quick", "paper"]),
    default="quick",
    show_default=True,
    help="How long it trains.",
)
@click.option(
    "--attention",
    type=click.Choice(["keep", "dba"]),
    default="keep",
    show_default=True,
    help="Keep the teacher's, or decoupled attention with a smaller cache of keys and values.",
)
@click.option(
    "--sem-dim",
    type=click.IntRange(min=1),
    help="Semantic features per head, with --attention dba.",
)
@click.option(
    "--geo-dim",
    type=click.IntRange(min=1),
    help="Geometric features per head, with --attention dba.",
)
@click.option(
    "--policy",
    type=click.Choice(["absmean", "ls", "gptq", "gptq_cd"]),
    help="How weights are rounded; default: gptq_cd.",
)
@click.option(
    "--blockwise-steps",
    type=click.IntRange(min=0),
    help="Steps per block; 0 leaves the phase out.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=0),
    help="Steps of the whole student; 0 leaves the phase out.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Samples in a batch.",
)
@click.option("--block-size", type=click.IntRange(min=1), help="Tokens of a sample.")
@click.option("--data", metavar="PATH", help="Text to train on; default: the built-in text.")
@click.option("--tokenizer", metavar="PATH", help="Tokenizer of the text; default: the teacher's.")
@click.option(
    "--device", default="cpu", show_default=True, metavar="NAME", help="cpu, cuda, cuda:N or mps."
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seed of all randomness.",
)
@overrides
@click.option("--config-only", is_flag=True, help="Write the config, and run nothing.")
@click.option(
    "--resume", is_flag=True, help="Continue the run in DIR, with the config that is there."
)
@plugin_files
@as_json
@click.pass_context
def run(
    ctx: click.Context,
    /,
    model: str,
    out: Path,
    config_only: bool,
    resume: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    """Write DIR/config.yaml, which makes MODEL ternary, and run it in DIR/run.

    MODEL is a folder of transformers, a GGUF file, hf://org/name, or a run. The config can be
    changed and run again with `arb train DIR/config.yaml --run-dir DIR/run`.
    """
    wait_passively()
    from arb_ternary.errors import UsageProblem
    from arb_ternary_train.cli.outcome import show_outcome
    from arb_ternary_train.directory import RunDirectory
    from arb_ternary_train.loading import load_config
    from arb_ternary_train.runner import RunRequest, train

    config = out / CONFIG
    if resume:
        _refuse_options_of_the_config(ctx)
        if not config.is_file():
            raise UsageProblem(
                f"{config}: there is nothing to continue", f"arb upcycle {model} --out {out}"
            )
    else:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UsageProblem(
                f"{out}: exists and is not empty",
                f"Continue it with: arb upcycle {model} --out {out} --resume\nor choose another "
                f"folder.",
            )
        _write_config(model, out, asked)
        if config_only:
            click.echo(f"{config}: written; run it with: arb train {config} --run-dir {out / RUN}")
            return
    loaded = load_config(config)
    started = resume and RunDirectory(out / RUN).exists()
    report = train(
        loaded.config, RunRequest(directory=out / RUN, resume="auto" if started else None)
    )
    show_outcome(report, as_json=as_json)


def _refuse_options_of_the_config(ctx: click.Context) -> None:
    """Refuse options that would decide the config, which exists already."""
    from arb_ternary.errors import UsageProblem

    for parameter in ctx.command.params:
        name = str(parameter.name)
        if name in ("model", "out", "resume", "as_json") or not parameter.expose_value:
            continue
        if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT:
            flag = "--" + name.replace("_", "-") if name != "overrides" else "-o"
            raise UsageProblem(
                f"{flag}: has no effect with --resume, which continues with the existing config",
                "Leave it out, or start again in another folder.",
            )


def _write_config(model: str, out: Path, asked: dict[str, Any]) -> None:
    """Write the config if it is valid."""
    from arb_ternary.config.overrides import apply_overrides
    from arb_ternary.config.yaml_document import Document, dump_yaml
    from arb_ternary.errors import UsageProblem
    from arb_ternary.plugins.manager import manager
    from arb_ternary_train.loading import structure_run
    from arb_ternary_upcycle.recipe.outline import read_outline
    from arb_ternary_upcycle.recipe.run_config import UpcycleOptions, run_config

    changes = asked.pop("overrides")
    for name in ("sem_dim", "geo_dim"):
        if asked[name] is not None and asked["attention"] != "dba":
            raise UsageProblem(f"--{name.replace('_', '-')}: has no effect without --attention dba")
    outline = read_outline(model)
    print_notes(outline.notes)
    settings = run_config(outline, UpcycleOptions(**asked), out)
    document = apply_overrides(Document(settings, source=str(out / CONFIG)), changes)
    structure_run(document, manager().registry)
    out.mkdir(parents=True, exist_ok=True)
    (out / CONFIG).write_text(dump_yaml(document.data), encoding="utf-8")
