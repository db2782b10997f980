"""The command ``arb generate``: continue a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from arb_ternary_text.cli.options import sampling_options, stop_option
from arb_ternary_train.cli.options import load_options
from arb_ternary_train.openmp import wait_passively

if TYPE_CHECKING:
    from arb_ternary_text.models.cache import CacheNumbers


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--prompt", default="\n", help="Text to continue; default: a new line.")
@click.option("--max-new-tokens", type=click.IntRange(min=0), default=200, show_default=True)
@sampling_options
@stop_option
@click.option(
    "--unroll",
    is_flag=True,
    help="Draw many tokens in one pass through the model; for models that fill in gaps.",
)
@click.option(
    "--cache",
    type=click.Choice(["float", "int8"]),
    help="Format of the cached keys and values; int8 takes about half the memory of bfloat16. "
    "Default: float, as computed.",
)
@load_options
def generate(
    run: Path,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    stops: tuple[str, ...],
    unroll: bool,
    cache: CacheNumbers | None,
    backend: str | None,
    device: str | None,
) -> None:
    """Continue a prompt with the model of RUN, a run directory or a checkpoint.

    Text appears as it is drawn. It ends at an end token of the model's tokenizer, at a stop text,
    or after --max-new-tokens.
    """
    wait_passively()
    from arb_ternary.errors import UsageProblem
    from arb_ternary_text.data.tokenizers import encode_prompt, from_json, special_tokens
    from arb_ternary_text.models.generate import CachedModel, streamed_text, text_until
    from arb_ternary_text.models.generate import generate as draw
    from arb_ternary_train.restore import load_run

    if unroll and cache is not None:
        raise UsageProblem(
            "--cache: with --unroll there is no cache", "Remove one of the two options."
        )
    trained = load_run(run, backend=backend, device=device)
    model = trained.model
    generator: Callable[..., Iterator[int]] | None = None
    if unroll:
        generator = getattr(model, "unroll", None)
    elif isinstance(model, CachedModel):
        generator = partial(draw, model, cache=cache or "float")
    if generator is None:
        needed = "unroll" if unroll else "new_cache"
        raise UsageProblem(
            f"{run}: the model {trained.config.model.name!r} cannot generate this way: it has no "
            f"{needed}()"
        )
    attached = trained.directory.attachments()
    if "tokenizer" not in attached:
        raise UsageProblem(
            f"{run}: its data source {trained.config.data.name!r} has no tokenizer, so there is no "
            f"text to continue"
        )
    tokenizer = from_json(attached["tokenizer"])
    special = special_tokens(tokenizer)
    prompt_ids = encode_prompt(tokenizer, prompt)
    drawn = generator(
        prompt_ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        device=trained.device,
    )
    # A model that draws many tokens at once knows no end.
    until_end = takewhile(lambda token: token not in special.eos, drawn)
    pieces = text_until(streamed_text(tokenizer, prompt_ids, until_end), stops)
    click.echo(prompt, nl=False)
    for text in pieces:
        click.echo(text, nl=False)
    click.echo()
