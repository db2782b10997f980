"""The command ``arb bench``: how fast a model reads and writes here."""

from __future__ import annotations

import itertools
import resource
import statistics
import sys
from typing import TYPE_CHECKING, Any

import click

from arb_ternary.cli.options import as_json
from arb_ternary_train.cli.options import load_options
from arb_ternary_train.openmp import wait_passively

if TYPE_CHECKING:
    from collections.abc import Sequence

    from arb_ternary_text.models.cache import CacheNumbers
    from arb_ternary_text.speed import Case, Speed
    from arb_ternary_train.model_source import OpenModel


def _counts(
    _context: click.Context, _parameter: click.Parameter, text: str | None
) -> tuple[int, ...] | None:
    """Return whole numbers of at least 1 that commas separate, none twice."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise click.BadParameter(
            f"{text!r} is not a list of whole numbers of at least 1, such as 1,8"
        )
    return tuple(dict.fromkeys(map(int, parts)))


@click.command()
@click.argument("source", type=click.Path())
@click.option(
    "--prompt",
    "prompts",
    metavar="N,...",
    callback=_counts,
    default="512",
    show_default=True,
    help="Tokens to read.",
)
@click.option(
    "--new-tokens",
    metavar="N,...",
    callback=_counts,
    default="128",
    show_default=True,
    help="Tokens to write after the prompt.",
)
@click.option(
    "--batch",
    "batches",
    metavar="N,...",
    callback=_counts,
    default="1",
    show_default=True,
    help="Sequences at a time.",
)
@click.option(
    "--threads",
    metavar="N,...",
    callback=_counts,
    help="Threads that compute; default: as in `arb generate`.",
)
@click.option(
    "--repetitions",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Repetitions of each row, after one that does not count.",
)
@click.option(
    "--cache",
    type=click.Choice(["bfloat16", "float", "int8"]),
    help="Format of the cached keys and values; default: bfloat16, as in `arb generate`.",
)
@load_options
@as_json
def bench(
    source: str,
    prompts: tuple[int, ...],
    new_tokens: tuple[int, ...],
    batches: tuple[int, ...],
    threads: tuple[int, ...] | None,
    repetitions: int,
    cache: CacheNumbers | None,
    backend: str | None,
    device: str | None,
    as_json: bool,
) -> None:
    """Measure how fast the model of SOURCE reads prompts and writes tokens.

    SOURCE is a run, a checkpoint, a GGUF file, a Hugging Face folder, or hf://org/name. Lists
    separated by commas give a row for each combination. Rates are tokens per second over all
    sequences of a batch. The last column is the share of this machine's read bandwidth, measured
    in the same run, that writing takes up. Close other programs first.
    """
    wait_passively()
    import torch

    from arb_ternary.cli.output import print_json, print_notes
    from arb_ternary_text.speed import Case, check_cases, measure, read_bandwidth
    from arb_ternary_train.model_source import open_model

    opened = open_model(source, backend=backend, device=device)
    cases = [
        Case(threads=count, batch=batch, prompt=prompt, new_tokens=new)
        for count, batch, prompt, new in itertools.product(
            threads or (torch.get_num_threads(),), batches, prompts, new_tokens
        )
    ]
    model = check_cases(opened.module, cases, opened.source.model["name"])
    speeds: list[Speed] = []
    length = len(cases) * (repetitions + 1)
    with click.progressbar(length=length, label="measuring", file=sys.stderr) as bar:
        for case in cases:
            speed = measure(
                model,
                case,
                device=opened.device,
                cache=cache,
                repetitions=repetitions,
                advance=lambda: bar.update(1),
            )
            speeds.append(speed)
    # The buffer that is read for the bandwidth is not part of the peak.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = peak if sys.platform == "darwin" else peak * 1024
    counts = dict.fromkeys(case.threads for case in cases)
    bandwidths = {count: read_bandwidth(opened.backend, opened.device, count) for count in counts}
    print_notes(opened.source.notes)
    facts = _facts(opened, speeds, bandwidths, peak_bytes)
    if as_json:
        print_json(facts)
    else:
        _print(facts)


def _facts(
    opened: OpenModel, speeds: Sequence[Speed], bandwidths: dict[int, float], peak_bytes: int
) -> dict[str, Any]:
    """Return everything that was measured, as JSON values."""
    from arb_ternary_text.speed import model_bytes
    from arb_ternary_train.machine import processor_name

    return {
        "source": opened.source.shown,
        "model": opened.source.model["name"],
        "backend": opened.backend,
        "processor": processor_name(opened.device),
        "weight_bytes": model_bytes(opened.module),
        "peak_bytes": peak_bytes,
        "read_bandwidth": {str(threads): rate for threads, rate in bandwidths.items()},
        "rows": [_row(speed, bandwidths[speed.case.threads]) for speed in speeds],
    }


def _row(speed: Speed, bandwidth: float) -> dict[str, Any]:
    case: Case = speed.case
    rate = speed.read_rate()
    return {
        "threads": case.threads,
        "batch": case.batch,
        "prompt": case.prompt,
        "new_tokens": case.new_tokens,
        "prompt_tokens_per_second": statistics.mean(speed.prompt_rates),
        "prompt_deviation": statistics.pstdev(speed.prompt_rates),
        "decode_tokens_per_second": statistics.mean(speed.decode_rates),
        "decode_deviation": statistics.pstdev(speed.decode_rates),
        "bytes_per_token": speed.bytes_per_token,
        "share_of_read_bandwidth": None if rate is None else rate / bandwidth,
    }


def _print(facts: dict[str, Any]) -> None:
    """Print what was measured as a table, with the model and the machine above it."""
    from arb_ternary.cli.output import print_table
    from arb_ternary_train.progress import format_bytes

    click.echo(f"model    {facts['source']}: {format_bytes(facts['weight_bytes'])} of weights")
    click.echo(f"machine  {facts['processor']}, backend {facts['backend']}")
    click.echo(f"memory   {format_bytes(facts['peak_bytes'])} at the peak")
    for threads, rate in facts["read_bandwidth"].items():
        click.echo(f"reading  {rate / 1e9:.1f} GB per second with {threads} threads")
    rows = []
    for row in facts["rows"]:
        share = row["share_of_read_bandwidth"]
        rows.append(
            (
                row["threads"],
                row["batch"],
                row["prompt"],
                row["new_tokens"],
                f"{row['prompt_tokens_per_second']:,.1f} ± {row['prompt_deviation']:.1f}",
                f"{row['decode_tokens_per_second']:,.1f} ± {row['decode_deviation']:.1f}",
                None if share is None else f"{share:.0%}",
            )
        )
    titles = (
        "threads",
        "batch",
        "prompt",
        "new",
        "read (tokens/s)",
        "write (tokens/s)",
        "of bandwidth",
    )
    print_table(titles, rows)
