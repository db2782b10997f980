"""The command ``arb generate``: continue a prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING

import click

from arb_ternary_text.cli.options import sampling_options, stop_option
from arb_ternary_train.cli.options import load_options
from arb_ternary_train.openmp import wait_passively

if TYPE_CHECKING:
    from arb_ternary_text.models.cache import CacheNumbers


@click.command()
@click.argument("source", type=click.Path())
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
    type=click.Choice(["bfloat16", "float", "int8"]),
    help="Format of the cached keys and values: float as computed; int8 takes about half the "
    "memory of bfloat16. Default: bfloat16.",
)
@load_options
def generate(
    source: str,
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
    """Continue a prompt with the model of SOURCE: a run, a checkpoint, a GGUF file, a Hugging Face
    folder, or hf://org/name.

    Text appears as it is drawn. It ends at an end token of the model's tokenizer, at a stop text,
    or after --max-new-tokens.
    """
    wait_passively()
    from arb_ternary.cli.output import print_notes
    from arb_ternary.errors import UsageProblem
    from arb_ternary_text.data.tokenizers import attached_tokenizer, encode_prompt, special_tokens
    from arb_ternary_text.models.generate import CachedModel, streamed_text, text_until
    from arb_ternary_text.models.generate import generate as draw
    from arb_ternary_train.model_source import open_model

    if unroll and cache is not None:
        raise UsageProblem(
            "--cache: with --unroll there is no cache", "Remove one of the two options."
        )
    opened = open_model(source, backend=backend, device=device)
    model = opened.module
    generator: Callable[..., Iterator[int]] | None = None
    if unroll:
        generator = getattr(model, "unroll", None)
    elif isinstance(model, CachedModel):
        generator = partial(draw, model, cache=cache)
    if generator is None:
        needed = "unroll" if unroll else "new_cache"
        name = opened.source.model["name"]
        raise UsageProblem(
            f"{source}: the model {name!r} cannot generate this way: it has no {needed}()"
        )
    tokenizer = attached_tokenizer(opened.source.attachments, source)
    special = special_tokens(tokenizer)
    prompt_ids = encode_prompt(tokenizer, prompt)
    drawn = generator(
        prompt_ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        device=opened.device,
    )
    # A model that draws many tokens at once knows no end.
    until_end = takewhile(lambda token: token not in special.eos, drawn)
    pieces = text_until(streamed_text(tokenizer, prompt_ids, until_end), stops)
    print_notes(opened.source.notes)
    click.echo(prompt, nl=False)
    for text in pieces:
        click.echo(text, nl=False)
    click.echo()
