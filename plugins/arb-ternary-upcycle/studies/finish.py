"""The end of an upcycle: its model in llama.cpp, beside a file of the model that it came from.

The newest checkpoint of a run is exported to GGUF. Twenty prompts of the built-in validation text
are continued greedily, by llama.cpp and by the model here, in three ways:

* ``int8``: as the run computes, activations rounded token by token;
* ``blocks``: activations rounded before each matrix as llama.cpp rounds them for the type of that
  matrix (Q8_K in blocks of 256, Q8_0 in blocks of 32, or float16), so that both compute the same
  numbers but for the order of sums;
* ``float``: activations as they are.

A number that lies between two whole multiples is rounded either way by the last bit of a sum, and
in a deep model all that follows hangs on it: also ``blocks`` may part from llama.cpp where two
tokens are about as likely. So the model is exported a second time with weights of float32, the same
numbers, where llama.cpp rounds nothing; there the texts have to be those of ``float``. Where two
texts part, the report says after how many tokens, and how far apart the two likeliest logits were
there. Size and speed (medians, the files in turn) stand beside those of the original file, and of a
third export, ``small``, whose float matrices are rounded to ``--float-type``. Needs xllamacpp::

    python plugins/arb-ternary-upcycle/studies/finish.py runs/smollm2 \\
        --original SmolLM2-135M-Instruct-Q4_1.gguf \\
        --work /tmp/finish --out finish.json

Exits with 1 where a text of the second export is not that of ``float``.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xllamacpp
from torch import Tensor, nn

from arb_ternary_gguf.names import tensor_name
from arb_ternary_gguf.reader import GgufFile
from arb_ternary_text.data.tokenizers import Tokenizer, from_json
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.generate import generate
from arb_ternary_text.models.parts import TiedHead
from arb_ternary_train.export import export_run
from arb_ternary_train.restore import load_run
from arb_ternary_upcycle.verification.questions import built_in_questions

PROMPTS = 20
WAYS = ("int8", "blocks", "float")


# --- activations as llama.cpp rounds them


def rounded_q8_k(x: Tensor) -> Tensor:
    """Blocks of 256: the largest number becomes -127, the others the nearest whole multiples,
    halves to even.
    """
    blocks = x.float().view(*x.shape[:-1], -1, 256)
    largest = blocks.gather(-1, blocks.abs().argmax(dim=-1, keepdim=True))
    factor = torch.where(largest == 0, 0.0, -127.0 / largest)
    whole = (blocks * factor).round().clamp(max=127)
    rounded: Tensor = torch.where(factor == 0, 0.0, whole * (1.0 / factor))
    return rounded.flatten(-2)


def rounded_q8_0(x: Tensor) -> Tensor:
    """Blocks of 32: whole multiples of a 127th of the largest magnitude, whose size is kept as
    float16.
    """
    blocks = x.float().view(*x.shape[:-1], -1, 32)
    scale = blocks.abs().amax(dim=-1, keepdim=True) / 127
    factor = torch.where(scale == 0, 0.0, 1.0 / scale)
    rounded: Tensor = (blocks * factor).round() * scale.half().float()
    return rounded.flatten(-2)


ROUNDINGS: Mapping[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("TQ1_0", "TQ2_0"), rounded_q8_k),
    **dict.fromkeys(("Q2_0", "Q4_0"), rounded_q8_0),
    "F16": lambda x: x.half().float(),
    "BF16": lambda x: x.bfloat16().float(),
    "F32": lambda x: x,
}


@contextmanager
def computing(model: Decoder, way: str, file: GgufFile) -> Iterator[None]:
    """``model`` with activations in one of :data:`WAYS`; ``file`` is its export."""
    if way not in WAYS:
        raise ValueError(way)
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "activations")]
    before = [module.activations for module in modules]
    hooks = []
    for module in modules:
        module.activations = "int8" if way == "int8" else "float"
    if way == "blocks":
        for path, module in multiplying(model).items():
            rounding = ROUNDINGS[file.tensors[tensor_name(path)].type.name]
            hooks.append(
                module.register_forward_pre_hook(
                    lambda _, inputs, rounding=rounding: (rounding(inputs[0]),)
                )
            )
    try:
        yield
    finally:
        for module, activations in zip(modules, before, strict=True):
            module.activations = activations
        for hook in hooks:
            hook.remove()


def multiplying(model: Decoder) -> dict[str, nn.Module]:
    """The modules that multiply activations with a matrix, by the path of the matrix."""
    linears = ("query", "key", "value", "output", "gate", "up", "down")
    found = {
        f"blocks.{number}.{path}": module
        for number, block in enumerate(model.blocks)
        for path, module in block.named_modules()
        if path.rpartition(".")[2] in linears and not path.startswith("attention.biases")
    }
    return {**found, "embedding" if isinstance(model.head, TiedHead) else "head": model.head}


# --- llama.cpp


class LlamaCpp:
    """A file in llama.cpp, on the processor, keys and values in float32."""

    def __init__(self, path: Path, *, context: int, threads: int) -> None:
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx = context
        parameters.n_batch = context
        parameters.n_parallel = 1
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
        parameters.n_gpu_layers = 0
        parameters.warmup = False
        parameters.fit_params = False
        parameters.cache_ram_mib = 0
        parameters.verbosity = 0
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = xllamacpp.Server(parameters)

    def continued(
        self, prompt: Sequence[int] | str, tokens: int, *, probabilities: int = 1
    ) -> dict[str, Any]:
        """``ids`` and ``text`` of the likeliest continuation, tokens a second of ``prefill`` and
        ``decode``.

        ``top``: log probabilities of the likeliest first tokens, ``probabilities`` of them.
        """
        request = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": tokens,
        }
        more = {
            "temperature": 0,
            "logprobs": probabilities,
            "ignore_eos": True,
            "cache_prompt": False,
        }
        answer = self._server.handle_completions({**request, **more})
        if "error" in answer:
            raise SystemExit(f"llama.cpp: {answer['error']}")
        choice = answer["choices"][0]
        timings = answer["timings"]
        entries = choice["logprobs"]["content"]
        return {
            "ids": [entry["id"] for entry in entries],
            "top": {
                entry["id"]: entry["logprob"]
                for entry in (entries[0]["top_logprobs"] if entries else [])
            },
            "text": choice["text"],
            "prefill": timings["prompt_per_second"],
            "decode": timings["predicted_per_second"],
        }


# --- the study


def greedy(model: Decoder, prompt: Sequence[int], tokens: int) -> list[int]:
    """The likeliest continuation here."""
    return list(generate(model, prompt, max_new_tokens=tokens, temperature=0))


def parting(mine: Sequence[int], theirs: Sequence[int]) -> int:
    """The first place where two continuations differ, which may be the end of the shorter one."""
    places = (
        place for place, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]
    )
    return next(places, min(len(mine), len(theirs)))


def gap_at(model: Decoder, ids: Sequence[int]) -> float:
    """How far apart the two likeliest logits are after ``ids``."""
    with torch.no_grad():
        best = model(torch.tensor([list(ids)]))[0, -1].float().topk(2).values
    return float(best[0] - best[1])


class Texts:
    """Greedy continuations of prompts by ``model``, each computed once."""

    def __init__(
        self, model: Decoder, tokenizer: Tokenizer, prompts: Sequence[str], tokens: int
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.tokens = tokens
        self._found: dict[tuple[str, str], list[int]] = {}

    def of(self, way: str, prompt: str) -> list[int]:
        """The ids after ``prompt``, within ``computing(model, way, ...)``; of one file only."""
        if (way, prompt) not in self._found:
            self._found[way, prompt] = greedy(
                self.model, self.tokenizer.encode(prompt), self.tokens
            )
        return self._found[way, prompt]


def compare(texts: Texts, file: GgufFile, server: LlamaCpp, ways: Sequence[str]) -> dict[str, Any]:
    """Each prompt's continuation by llama.cpp, and in each way here; how many of them are the
    same.
    """
    rows: list[dict[str, Any]] = []
    for prompt in texts.prompts:
        ids = texts.tokenizer.encode(prompt)
        theirs = server.continued(ids, texts.tokens)
        row: dict[str, Any] = {"prompt": prompt, "llama.cpp": theirs["text"]}
        for way in ways:
            with computing(texts.model, way, file):
                mine = texts.of(way, prompt)
                text = texts.tokenizer.decode(mine)
                # The server names no token that is half a character, so that ids tell only where
                # texts part.
                same = text == theirs["text"]
                place = None if same else parting(mine, theirs["ids"])
                gap = None if place is None else gap_at(texts.model, [*ids, *mine[:place]])
            row[way] = {"same": same, "text": text, "parts_after": place, "gap": gap}
        rows.append(row)
    return {"same": {way: sum(row[way]["same"] for row in rows) for way in ways}, "prompts": rows}


def speeds(
    servers: Mapping[str, LlamaCpp], prompts: Sequence[str], tokens: int, repeats: int
) -> dict[str, Any]:
    """Median tokens a second of each file, over ``repeats`` turns; the first turn does not
    count.
    """
    found: dict[str, dict[str, list[float]]] = {
        name: {"prefill": [], "decode": []} for name in servers
    }
    for turn in range(repeats + 1):
        for name, server in servers.items():
            answer = server.continued(prompts[turn % len(prompts)], tokens)
            if turn:
                for what, numbers in found[name].items():
                    numbers.append(answer[what])
    return {
        name: {what: statistics.median(each) for what, each in rates.items()}
        for name, rates in found.items()
    }


def processor() -> str:
    """Its name on Linux, its kind elsewhere."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def study(options: argparse.Namespace) -> dict[str, Any]:
    """Everything; the result is plain JSON."""
    options.work.mkdir(parents=True, exist_ok=True)
    names = ("student", "student-f32", "student-small")
    exported, exact, small = (options.work / f"{name}.gguf" for name in names)
    export_run(options.run, exported, "gguf", [f"type={options.type}"])
    export_run(options.run, exact, "gguf", ["type=f32"])
    export_run(
        options.run, small, "gguf", [f"type={options.type}", f"float_type={options.float_type}"]
    )
    run = load_run(options.run)
    model = run.model
    if not isinstance(model, Decoder):
        raise SystemExit(f"{options.run}: its model is no decoder")
    tokenizer = from_json(run.directory.attachments()["tokenizer"])
    prompts = [question.prompt for question in built_in_questions() if question.by_choice][:PROMPTS]
    file = GgufFile(exported)
    place = {"context": options.context, "threads": options.threads}
    texts = Texts(model, tokenizer, prompts, options.tokens)
    student = LlamaCpp(exported, **place)
    packed = compare(texts, file, student, WAYS)
    result: dict[str, Any] = {
        "run": str(options.run),
        "step": run.checkpoint.step,
        "tokens": options.tokens,
        "machine": {"processor": processor(), "threads": options.threads, "backend": run.backend},
        "types": count_types(file),
        "greedy": packed,
        "exact": compare(texts, GgufFile(exact), LlamaCpp(exact, **place), ("float",)),
    }
    files = {"student": exported, "small": small}
    servers = {"student": student, "small": LlamaCpp(small, **place)}
    if options.original is not None:
        files["original"] = options.original
        servers["original"] = LlamaCpp(options.original, **place)
    rates = speeds(servers, prompts, options.tokens, options.repeats)
    result["files"] = {
        name: {"bytes": path.stat().st_size, **rates[name]} for name, path in files.items()
    }
    return result


def count_types(file: GgufFile) -> dict[str, int]:
    """How many matrices each type stores."""
    counts: dict[str, int] = {}
    for info in file.tensors.values():
        if len(info.shape) > 1:
            counts[info.type.name] = counts.get(info.type.name, 0) + 1
    return counts


def show(result: Mapping[str, Any]) -> None:
    """Print what matters."""
    for kind, title in (("greedy", "packed"), ("exact", "float32")):
        rows = result[kind]["prompts"]
        for way, same in result[kind]["same"].items():
            print(
                f"{title} weights: greedy text as by {way}: {same} of {len(rows)}, "
                f"{result['tokens']} tokens each"
            )
            for row in rows:
                if not row[way]["same"]:
                    after = row[way]["parts_after"]
                    gap = row[way]["gap"]
                    print(
                        f"  parts after {after} tokens, where the best two logits are {gap:.4f} "
                        f"apart"
                    )
    for name, facts in result["files"].items():
        print(
            f"{name}: {facts['bytes']:,} bytes, prefill {facts['prefill']:.1f} tokens/s, decode "
            f"{facts['decode']:.1f}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="run directory or checkpoint of the student")
    parser.add_argument("--original", type=Path, help="GGUF file of the model that it came from")
    parser.add_argument(
        "--type", default="auto", help="option of the exporter: auto, tq2_0, q2_0, ..."
    )
    parser.add_argument(
        "--float-type", default="q8_0", help="of float matrices in the third export"
    )
    parser.add_argument("--tokens", type=int, default=32, help="tokens that follow each prompt")
    parser.add_argument(
        "--context", type=int, default=512, help="context in llama.cpp, prompt and tokens together"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=10, help="timed turns of each file")
    parser.add_argument("--work", type=Path, required=True, help="folder for the exported files")
    parser.add_argument("--out", type=Path, required=True, help="the result, JSON")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    result = study(options)
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    show(result)
    return 0 if result["exact"]["same"]["float"] == len(result["exact"]["prompts"]) else 1


if __name__ == "__main__":
    sys.exit(main())
