"""The generator ``text_diffusion``: draw text with a model that fills in hidden tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from arb_ternary_text.cli.options import sampling_options
from arb_ternary_train.cli.options import load_options
from arb_ternary_train.openmp import wait_passively

if TYPE_CHECKING:
    from arb_ternary_diffusion.text_sampler import Order


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--prompt", default="", help="Text to fill in and to continue; default: none.")
@click.option(
    "--gap",
    default="_",
    show_default=True,
    help="Character in the prompt that stands for one token to draw; '' = none.",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(0, 1_000_000),
    help="Number of tokens after the prompt. Default: none if the prompt has gaps, otherwise as "
    "many as fit into the context.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Most passes through the model.",
)
@click.option(
    "--order",
    type=click.Choice(["ancestral", "confidence"]),
    default="ancestral",
    show_default=True,
    help="Which tokens a step reveals: random ones, as the reverse of the noise, or those that the "
    "model is most certain of.",
)
@sampling_options
@click.option("--show-steps", is_flag=True, help="Print the text with its gaps after each step.")
@load_options
def generate(
    run: Path,
    prompt: str,
    gap: str,
    max_new_tokens: int | None,
    steps: int,
    order: Order,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    show_steps: bool,
    backend: str | None,
    device: str | None,
) -> None:
    """Fill the gaps of a prompt and continue it with the model of RUN.

    RUN is a run directory or a checkpoint. Its model must have been trained to fill in hidden
    tokens, preferably with masking: absorbing.
    """
    wait_passively()
    from arb_ternary_diffusion.text_draft import fill_draft, parse_draft
    from arb_ternary_diffusion.text_run import load_text_run
    from arb_ternary_diffusion.text_sampler import Filling
    from arb_ternary_text.models.generate import seeded_generator

    filling = Filling(steps=steps, order=order, temperature=temperature, top_k=top_k, top_p=top_p)
    trained = load_text_run(run, backend=backend, device=device)
    draft = parse_draft(prompt, trained.tokenizer, gap, trained.mask_token)
    if max_new_tokens is None:
        max_new_tokens = 0 if draft.hidden else max(0, trained.context - len(draft.ids))
    drafts = fill_draft(
        filling,
        trained.predict,
        draft,
        new_tokens=max_new_tokens,
        context=trained.context,
        mask_token=trained.mask_token,
        generator=seeded_generator(seed),
    )
    for number, filled in enumerate(drafts, 1):
        draft = filled
        if show_steps and draft.hidden:
            click.echo(f"--- step {number}, {draft.hidden} to go")
            click.echo(draft.text(trained.tokenizer, gap or "_"))
    click.echo(draft.text(trained.tokenizer, gap))
