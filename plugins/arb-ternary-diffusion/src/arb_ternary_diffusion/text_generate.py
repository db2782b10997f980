"""The generator ``text_diffusion``: text from a model that fills in hidden tokens."""

from __future__ import annotations

from pathlib import Path

import click

from arb_ternary.cli.options import plugin_files
from arb_ternary_train.openmp import wait_passively


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--prompt", default="", help="Text to fill in and to continue; default: none.")
@click.option(
    "--gap",
    default="_",
    show_default=True,
    help="Character that stands for one token to draw; '' = none.",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=0),
    help="Tokens after the prompt; default: none where it has gaps, else as many as the model sees "
    "beside it.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Passes through the model, at most.",
)
@click.option(
    "--order",
    type=click.Choice(["ancestral", "confidence"]),
    default="ancestral",
    show_default=True,
    help="What a step reveals: tokens by chance, as the noise run backwards, or those that the "
    "model is surest of.",
)
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
@click.option("--show-steps", is_flag=True, help="Print the text after each step, with its gaps.")
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
    gap: str,
    max_new_tokens: int | None,
    steps: int,
    order: str,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    show_steps: bool,
    backend: str | None,
    device: str | None,
) -> None:
    """Fill the gaps of a prompt and continue it, with the model of RUN (a run directory or a
    checkpoint).

    The model must be one that was trained to fill in hidden tokens, best by masking: absorbing.
    """
    wait_passively()
    from arb_ternary_diffusion.text_draft import draft_of, fill_draft
    from arb_ternary_diffusion.text_run import load_text_run
    from arb_ternary_diffusion.text_sampler import Filling, generator_of

    filling = Filling(steps=steps, order=order, temperature=temperature, top_k=top_k, top_p=top_p)  # type: ignore[arg-type]
    trained = load_text_run(run, backend=backend, device=device)
    draft = draft_of(prompt, trained.tokenizer, gap, trained.mask_token)
    if max_new_tokens is None:
        max_new_tokens = 0 if draft.hidden else max(0, trained.context - len(draft.ids))
    drafts = fill_draft(
        filling,
        trained.denoise,
        draft,
        new_tokens=max_new_tokens,
        context=trained.context,
        mask_token=trained.mask_token,
        generator=generator_of(seed),
    )
    for number, state in enumerate(drafts, 1):
        draft = state
        if show_steps and draft.hidden:
            click.echo(
                f"--- step {number}, {draft.hidden} to "
                f"go\n{draft.text(trained.tokenizer, gap or '_')}"
            )
    click.echo(draft.text(trained.tokenizer, gap))
