"""What llama.cpp writes with the export of a run: README's sample, and whether it is what the run
itself writes.

    arb export runs/demo demo.gguf --format gguf
    python plugins/arb-ternary-bench/studies/sample.py demo.gguf --out RESULT

    arb export runs/demo float.gguf --format gguf --type f32
    python plugins/arb-ternary-bench/studies/sample.py float.gguf --like runs/demo

The first draws a continuation of ``--prompt`` and prints it; ``make generate`` puts the result,
where it is ``plugins/arb-ternary-bench/results/demo-sample.json``, into README.md. The second takes
the likeliest token each time, in llama.cpp and in the run with activations that are not rounded, as
a file of type ``f32`` computes, and fails where the two texts part. Models of bytes; needs ``pip
install xllamacpp``.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from arb_ternary_bench.compare import machine_facts
from arb_ternary_text.models.generate import generate
from arb_ternary_train.restore import load_run

PROMPT = "MACBETH."


def by_llama_cpp(path: Path, prompt: str, **options: Any) -> str:
    """What the file's model writes after ``prompt``, on one thread, with keys and values in
    float32.
    """
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx = 256
    parameters.n_parallel = 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
    parameters.n_gpu_layers = 0
    parameters.warmup = False
    parameters.fit_params = False
    parameters.cache_ram_mib = 0
    parameters.verbosity = 0
    parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    answer = xllamacpp.Server(parameters).handle_completions({"prompt": prompt, **options})
    if "error" in answer:
        raise SystemExit(f"llama.cpp: {answer['error']}")
    return str(answer["choices"][0]["text"])


def by_run(run: Path, prompt: str, tokens: int) -> str:
    """The likeliest bytes after ``prompt``, with activations that are not rounded."""
    model = load_run(run).model.eval()
    for module in model.modules():
        if hasattr(module, "activations"):
            module.activations = "float"
    written = generate(model, list(prompt.encode()), max_new_tokens=tokens, temperature=0)
    return bytes(written).decode(errors="replace")


def table(result: dict[str, Any]) -> str:
    """The sample as README.md shows it."""
    machine = result["machine"]
    settings = (
        f"seed {result['seed']}, temperature {result['temperature']}, top-p {result['top_p']}"
    )
    told = (
        f"xllamacpp {result['xllamacpp']}, {settings}; {machine['processor']}, "
        f"{machine['cores']} cores"
    )
    text = (result["prompt"] + result["text"]).rstrip()
    return f"```\n{text}\n```\n\n{told}. Command: `{result['command']}`."


def main() -> int:
    """Draw and print, or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="a GGUF file")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument(
        "--tokens", type=int, default=110, help="how many bytes to write (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--like", type=Path, metavar="RUN", help="compare the likeliest text with that of this run"
    )
    parser.add_argument("--out", type=Path, help="write the sample here, as JSON")
    arguments = parser.parse_args()
    prompt = arguments.prompt
    tokens = arguments.tokens
    if arguments.like is not None:
        found = by_llama_cpp(arguments.file, prompt, max_tokens=tokens, temperature=0)
        wanted = by_run(arguments.like, prompt, tokens)
        print(prompt + found)
        if found != wanted:
            print(f"the run writes otherwise:\n{prompt}{wanted}", file=sys.stderr)
            return 1
        print(f"the run writes the same {tokens} bytes")
        return 0
    options = {
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
        "seed": arguments.seed,
    }
    text = by_llama_cpp(arguments.file, prompt, max_tokens=tokens, **options)
    print(prompt + text)
    if arguments.out is not None:
        command = f"python plugins/arb-ternary-bench/studies/sample.py {arguments.file.name}"
        result = {"command": command, "machine": machine_facts(), "xllamacpp": version("xllamacpp")}
        result |= {"prompt": prompt, **options, "text": text}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
