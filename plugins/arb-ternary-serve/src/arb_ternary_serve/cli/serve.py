"""The command ``arb serve``: answer requests of the OpenAI API."""

from __future__ import annotations

import re
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import click

from arb_ternary_train.cli.options import load_options
from arb_ternary_train.openmp import wait_passively

if TYPE_CHECKING:
    import socket

    from arb_ternary_serve.app import Limits
    from arb_ternary_serve.worker import ModelWorker
    from arb_ternary_text.models.cache import CacheNumbers

#: Powers of two of the units of sizes.
_POWERS = {None: 0, "k": 10, "m": 20, "g": 30, "t": 40}


def _read_bytes(_context: click.Context, _parameter: click.Parameter, value: str) -> int:
    """Return a size such as 4194304, 4MiB or 1.5GiB as a number of bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])i?)?b?", value.strip().lower())
    if found is None:
        raise click.BadParameter(f"{value!r} is no size, such as 4194304, 512MiB or 2GiB")
    number, unit = found.groups()
    return int(float(number) * 2 ** _POWERS[unit])


@click.command()
@click.argument("source", required=False, type=click.Path())
@click.option(
    "--model",
    "named",
    multiple=True,
    metavar="NAME=SOURCE",
    help="A model and its name in requests, instead of SOURCE. Repeatable.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="0 takes a free one.",
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="File of the keys that requests need one of, one per line.",
)
@click.option(
    "--max-sequences",
    type=click.IntRange(min=1),
    default=16,
    show_default=True,
    help="Answers of a model that are drawn together.",
)
@click.option(
    "--max-waiting",
    type=click.IntRange(min=0),
    default=64,
    show_default=True,
    help="Answers of a model that wait for those; more requests are turned away.",
)
@click.option(
    "--cache-memory",
    metavar="BYTES",
    callback=_read_bytes,
    default="1GiB",
    show_default=True,
    help="Memory of a model for keys and values.",
)
@click.option(
    "--cache",
    type=click.Choice(["bfloat16", "float", "int8"]),
    help="Format of keys and values: float as computed; int8 takes about half the memory of "
    "bfloat16. Default: bfloat16.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=4096,
    show_default=True,
    help="Longest answer that a request may ask for.",
)
@click.option(
    "--max-body",
    metavar="BYTES",
    callback=_read_bytes,
    default="4MiB",
    show_default=True,
    help="Largest body of a request.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600,
    show_default=True,
    help="Seconds after which an answer is ended.",
)
@click.option(
    "--read-timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=20,
    show_default=True,
    help="Seconds in which a client has to send a request.",
)
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads that compute.")
@load_options
def serve(
    source: str | None,
    named: tuple[str, ...],
    host: str,
    port: int,
    api_key_file: Path | None,
    max_sequences: int,
    max_waiting: int,
    cache_memory: int,
    cache: CacheNumbers | None,
    max_tokens: int,
    max_body: int,
    timeout: float,
    read_timeout: float,
    threads: int | None,
    backend: str | None,
    device: str | None,
) -> None:
    """Answer requests of the OpenAI API with the model of SOURCE: a run, a checkpoint, a GGUF file,
    a Hugging Face folder, or hf://org/name.

    SIGTERM or Ctrl-C ends it after the answers that are being drawn; a second one at once.
    """
    sources = _sources(source, named)
    keys = _keys(api_key_file)
    local = _is_loopback(host)
    if not local and not keys:
        from arb_ternary.errors import UsageProblem

        raise UsageProblem(
            f"--host: {host} can be reached from other machines, and requests need no key",
            "Give --api-key-file, or leave --host out to serve this machine alone.",
        )
    wait_passively()
    import asyncio
    from functools import partial

    import torch

    from arb_ternary_chat.model import load_model
    from arb_ternary_serve.app import Api, Limits
    from arb_ternary_serve.engine import Engine
    from arb_ternary_serve.gate import GateRules, log_failure, log_to_stderr
    from arb_ternary_serve.server import Server, bind, listen
    from arb_ternary_serve.worker import ModelWorker

    if threads is not None:
        torch.set_num_threads(threads)
    bound = bind(host, port)
    workers = []
    for name, each in sources.items():
        model = load_model(each, device=device, backend=backend)
        make_engine = partial(
            Engine,
            model.causal,
            max_sequences=max_sequences,
            cache_bytes=cache_memory,
            cache=cache,
            device=model.device,
        )
        worker = ModelWorker(
            name,
            model,
            make_engine,
            max_sequences=max_sequences,
            max_waiting=max_waiting,
            report=log_failure,
        )
        workers.append(worker)
    limits = Limits(max_tokens, max_body, timeout, read_timeout)
    hosts = frozenset({"localhost", "127.0.0.1", "::1", host}) if local else None
    api = Api(workers, limits, GateRules(keys, hosts), log_to_stderr)
    server = Server(api, workers, read_timeout)
    listen(bound)
    _tell(bound, workers, limits, keys)
    asyncio.run(server.serve([bound]))
    if server.second_signal is not None:
        raise SystemExit(128 + server.second_signal)


def _sources(source: str | None, named: tuple[str, ...]) -> dict[str, str]:
    """Return the sources of models by name."""
    if (source is None) == (not named):
        raise click.UsageError("Give either SOURCE or --model NAME=SOURCE.")
    if source is not None:
        return {PurePath(source.rstrip("/")).stem or "model": source}
    found: dict[str, str] = {}
    for each in named:
        name, separator, place = each.partition("=")
        if not (separator and name and place):
            raise click.BadParameter(f"{each!r} is not NAME=SOURCE", param_hint="--model")
        if name in found:
            raise click.BadParameter(f"there are two models {name!r}", param_hint="--model")
        found[name] = place
    return found


def _keys(file: Path | None) -> tuple[str, ...]:
    """Return the keys that requests need one of."""
    from arb_ternary_serve.settings import API_KEY

    origin = API_KEY.name if file is None else str(file)
    text = API_KEY.read() if file is None else file.read_text(encoding="utf-8", errors="replace")
    keys = tuple(filter(None, map(str.strip, text.splitlines())))
    if file is not None and not keys:
        raise click.UsageError(f"{origin}: there is no key in it.")
    if not all(each.isascii() and each.isprintable() for each in keys):
        raise click.UsageError(f"{origin}: a key consists of ASCII characters.")
    return keys


def _is_loopback(host: str) -> bool:
    from ipaddress import ip_address

    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _tell(
    bound: socket.socket, workers: list[ModelWorker], limits: Limits, keys: tuple[str, ...]
) -> None:
    """Print what is served, and where."""
    from arb_ternary_train.progress import format_bytes

    host, port = bound.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    needed = "with a key" if keys else "without a key"
    click.echo(f"serving on http://{shown}:{port}, {needed}")
    for worker in workers:
        weights, cache = worker.memory
        click.echo(
            f"model {worker.name}: {format_bytes(weights)} of weights, {format_bytes(cache)} for "
            f"keys and values of {worker.load.blocks:,} blocks"
        )
    click.echo(
        f"limits: {limits.max_tokens:,} tokens of an answer, {format_bytes(limits.max_body)} of a "
        f"request, {limits.seconds:g} s"
    )
