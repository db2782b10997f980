"""``arb generate``: continue a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from arb_ternary.cli.options import plugin_files
from arb_ternary_train.openmp import wait_passively

if TYPE_CHECKING:
    from arb_ternary_text.models.cache import CacheNumbers


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--prompt", default="\n", help="Text to continue; default: a new line.")
@click.option("--max-new-tokens", type=click.IntRange(min=0), default=200, show_default=True)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0.0),
    default=0.8,
    show_default=True,
    help="0 = the likeliest.",
)
@click.option(
    "--top-k", type=click.IntRange(min=1), help="Draw among so many of the likeliest tokens only."
)
@click.option(
    "--top-p",
    type=click.FloatRange(0.0, 1.0, min_open=True),
    help="Draw among so much of the probability.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    help="The same seed gives the same text; default: another each time.",
)
@click.option(
    "--unroll",
    is_flag=True,
    help="Draw many tokens in one pass through the model; for models that fill in gaps.",
)
@click.option(
    "--cache",
    type=click.Choice(["float", "int8"]),
    help="What keys and values are kept as; int8 takes about half of bfloat16's memory. Default: "
    "float, as computed.",
)
@click.option(
    "--backend",
    metavar="NAME",
    help="Kernel backend, over ARB_TERNARY_BACKEND and the run's config.",
)
@click.option("--device", help="cpu, cuda, cuda:N or mps; default: the run's own.")
@plugin_files
def generate(
    run: Path,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    unroll: bool,
    cache: CacheNumbers | None,
    backend: str | None,
    device: str | None,
) -> None:
    """Continue a prompt with the model of RUN (a run directory or a checkpoint); text appears as it
    is drawn.
    """
    wait_passively()
    from arb_ternary.errors import UsageProblem
    from arb_ternary_text.data.tokenizers import from_json
    from arb_ternary_text.models.generate import CachedModel, Unrolls, streamed_text
    from arb_ternary_text.models.generate import generate as draw
    from arb_ternary_train.restore import load_run

    if unroll and cache is not None:
        raise UsageProblem(
            "--cache: with --unroll nothing is kept of earlier tokens", "Leave one of the two out."
        )
    trained = load_run(run, backend=backend, device=device)
    model = trained.model
    if unroll and isinstance(model, Unrolls):
        generator: Callable[..., Iterator[int]] = model.unroll
    elif not unroll and isinstance(model, CachedModel):
        generator = partial(draw, model, cache=cache or "float")
    else:
        needed = "unroll" if unroll else "new_cache"
        raise UsageProblem(
            f"{run}: the model {trained.config.model.name!r} cannot do this: it has no {needed}()"
        )
    attached = trained.directory.attachments()
    if "tokenizer" not in attached:
        raise UsageProblem(
            f"{run}: its data {trained.config.data.name!r} has no tokenizer, so that it has no text"
        )
    tokenizer = from_json(attached["tokenizer"])
    prompt_ids = tokenizer.encode(prompt)
    drawn = generator(
        prompt_ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        device=trained.device,
    )
    click.echo(prompt, nl=False)
    for text in streamed_text(tokenizer, prompt_ids, drawn):
        click.echo(text, nl=False)
    click.echo()
