"""Text that llama.cpp generates with the export of a run, compared with that of the run itself.

``file`` is a GGUF file of a model of bytes. With ``like``, a run, the likeliest text of both is
compared: export with ``--type f32``, since the run computes with activations that are not rounded.
Needs ``pip install xllamacpp``.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from attrs import frozen

from arb_ternary.config.options import LARGEST_INT64, non_negative, option, positive
from arb_ternary.errors import ArbError
from arb_ternary_bench.machine import machine_facts
from arb_ternary_bench.study import Session, Study
from arb_ternary_bench.table import Column, Record, ResultTable
from arb_ternary_text.models.generate import generate
from arb_ternary_train.restore import load_run


@frozen(kw_only=True)
class SampleOptions:
    """Options of the study."""

    file: str = option(help="a GGUF file")
    prompt: str = option("MACBETH.", "what the text begins with")
    tokens: int = option(110, "how many bytes to write", validator=positive)
    temperature: float = option(0.8, "0 = the likeliest byte each time", validator=non_negative)
    top_p: float = option(0.9, "share of the probability to draw from", validator=positive)
    seed: int = option(0, "seed of the draws", validator=non_negative, largest=LARGEST_INT64)
    like: str | None = option(None, "a run whose likeliest text has to be the same")


def by_llama_cpp(path: Path, prompt: str, **options: Any) -> str:
    """Continue ``prompt`` with a file's model, on one thread, with keys and values in float32."""
    xllamacpp: Any = import_module("xllamacpp")
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(path)
    parameters.n_ctx = 256
    parameters.n_parallel = 1
    parameters.cpuparams.n_threads = 1
    parameters.cpuparams_batch.n_threads = 1
    parameters.n_gpu_layers = 0
    parameters.warmup = False
    parameters.fit_params = False
    parameters.cache_ram_mib = 0
    parameters.verbosity = 0
    parameters.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
    parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    answer = xllamacpp.Server(parameters).handle_completions({"prompt": prompt, **options})
    if "error" in answer:
        raise ArbError(f"llama.cpp: {answer['error']}")
    return str(answer["choices"][0]["text"])


def by_run(run: Path, prompt: str, tokens: int) -> str:
    """Continue ``prompt`` with a run's likeliest bytes; activations are not rounded."""
    model: Any = load_run(run).model.eval()
    for module in model.modules():
        if hasattr(module, "activations"):
            module.activations = "float"
    ids = list(prompt.encode())
    written = generate(model, ids, max_new_tokens=tokens, temperature=0, cache="float")
    return bytes(written).decode(errors="replace")


def run(options: SampleOptions, session: Session) -> dict[str, Any]:
    """Draw a sample, or compare the likeliest texts.

    Raises:
        ArbError: the run writes another text.
    """
    file = Path(options.file)
    settings: dict[str, Any] = {"temperature": options.temperature}
    if options.like is None:
        settings |= {"top_p": options.top_p, "seed": options.seed}
    else:
        settings["temperature"] = 0
    text = by_llama_cpp(file, options.prompt, max_tokens=options.tokens, **settings)
    if options.like is not None:
        wanted = by_run(Path(options.like), options.prompt, options.tokens)
        if text != wanted:
            raise ArbError(f"llama.cpp writes {text!r}", f"the run writes {wanted!r}")
        session.say(f"the run writes the same {options.tokens} bytes")
    return {
        "command": f"python -m arb_ternary_bench.study sample -o file={file.name}",
        "machine": machine_facts(),
        "xllamacpp": version("xllamacpp"),
        "prompt": options.prompt,
        **settings,
        "text": text,
    }


def notes(result: Record) -> list[str]:
    """Return how the sample was drawn."""
    machine = result["machine"]
    drawn = [f"temperature {result['temperature']}"]
    if "seed" in result:
        drawn = [f"seed {result['seed']}", *drawn, f"top-p {result['top_p']}"]
    return [
        f"xllamacpp {result['xllamacpp']}, {', '.join(drawn)}; {machine['processor']}, "
        f"{machine['cores']} cores. Command: `{result['command']}`."
    ]


@frozen
class SampleTable(ResultTable):
    """The sample as a block of text."""

    def lines(self, result: Record) -> list[str]:
        """Return the prompt and its continuation."""
        return ["```", (result["prompt"] + result["text"]).rstrip(), "```"]


TABLE = SampleTable(
    columns=(Column("text", lambda result: result["prompt"] + result["text"], left=True),),
    records=lambda result: [result],
    notes=notes,
)
STUDY = Study(options=SampleOptions, run=run, table=TABLE)
