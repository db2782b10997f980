"""llama.cpp's server, from the package ``xllamacpp`` (PyPI), with the options of ``arb serve``."""

from __future__ import annotations

import signal

import click


@click.command()
@click.argument("file")
@click.option("--port", type=int)
@click.option("--threads", type=int)
@click.option("--max-sequences", type=int)
@click.option("--context", default=512, help="Tokens of a sequence.")
def main(file: str, port: int, threads: int, max_sequences: int, context: int) -> None:
    """Serve a GGUF file until the process is ended."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = file
    parameters.n_parallel = max_sequences
    parameters.n_ctx = max_sequences * context
    parameters.cpuparams.n_threads = threads
    parameters.cpuparams_batch.n_threads = threads
    parameters.n_gpu_layers = 0
    parameters.fit_params = False
    parameters.verbosity = 0
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = port
    server = xllamacpp.Server(parameters)
    print(server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
