"""One task file, one number, in four ways.

Ours; the harness with transformers on the exported folder; the harness with our server; llama.cpp
on the exported GGUF file.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace as Kit
from typing import Any

import pytest
import xllamacpp

import arb_ternary
from arb_ternary.cli.main import main
from arb_ternary_chat.model import Model, load_model
from arb_ternary_evals import adapter
from arb_ternary_evals.adapter import HarnessModel
from arb_ternary_evals.batches import Score, score_all
from arb_ternary_text.data.special_tokens import SpecialTokens

CONTEXT = 128
TASKS = ["choice", "perplexity"]
#: How far numbers may be from ours, and the type of numbers in the GGUF file. F32 and TQ2_0 hold
#: ternary weights exactly. llama.cpp multiplies TQ2_0 by activations of 8 bits, and F32 by floats.
LLAMA_CPP = {"F32": 1e-4, "TQ2_0": 0.02}

#: Evaluates in a process of its own, because tests connect to nothing.
CLIENT = """
import json, sys
import lm_eval
from lm_eval.tasks import TaskManager
arguments, folder, tasks = map(json.loads, sys.argv[1:])
found = lm_eval.simple_evaluate(
    model="local-completions",
    model_args=arguments,
    tasks=tasks,
    task_manager=TaskManager(include_path=folder, include_defaults=False),
    bootstrap_iters=0,
)
print(json.dumps({"results": found["results"], "samples": found["samples"]}, default=str))
"""

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def run(make_run: Callable[..., Path]) -> Path:
    """A run whose rows fit the blocks of TQ2_0. A space ends its answers, and it draws many."""
    special = SpecialTokens(bos=256, eos=(257, 32))
    return make_run(special, context=CONTEXT, width=256, feed_forward=512)


@pytest.fixture
def origin(run: Path) -> Iterator[str]:
    """The address of ``arb serve`` with the run."""
    command = [sys.executable, "-m", "arb_ternary", "serve", str(run), "--port", "0"]
    command += ["--cache", "float"]  # what is measured is the model, and not a format of its cache
    process = subprocess.Popen(
        [*command, "--threads", "1"], stdout=subprocess.PIPE, text=True, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    found = None
    lines = []
    while found is None and (line := process.stdout.readline()):
        lines.append(line)
        found = re.search(r"http://\S+:\d+", line)
    assert found is not None, "".join(lines)
    yield found[0]
    process.kill()
    process.communicate()


def by_transformers(folder: Path, task_files: Path) -> dict[str, Any]:
    """Return what the harness gives for an exported folder."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(folder)},
        tasks=TASKS,
        task_manager=TaskManager(include_path=str(task_files), include_defaults=False),
        device="cpu",
        bootstrap_iters=0,
    )
    assert found is not None
    return dict(found)


def by_server(origin: str, tokenizer: Path, task_files: Path) -> dict[str, Any]:
    """Return what the harness gives for a server."""
    arguments = {
        "base_url": f"{origin}/v1/completions",
        "model": "run",
        "tokenizer": str(tokenizer),
        "tokenizer_backend": "huggingface",
        "max_length": CONTEXT,
    }
    given = [json.dumps(each) for each in (arguments, str(task_files), TASKS)]
    done = subprocess.run(
        [sys.executable, "-c", CLIENT, *given], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def check(
    ours: Mapping[str, Any], likelihoods: Any, theirs: Mapping[str, Any], tolerance: float
) -> None:
    """Compare metrics of the tasks, and the log-likelihood of each choice."""
    for task, name in (("choice", "acc,none"), ("perplexity", "bits_per_byte,none")):
        expected = pytest.approx(ours[task]["metrics"][name], rel=tolerance)
        assert theirs["results"][task][name] == expected, name
    found = []
    for sample in sorted(theirs["samples"]["choice"], key=lambda sample: sample["doc_id"]):
        found += [(float(resp[0][0]), resp[0][1] in (True, "True")) for resp in sample["resps"]]
    assert len(found) == len(likelihoods)
    for (value, greedy), (expected, expected_greedy) in zip(found, likelihoods, strict=True):
        assert value == pytest.approx(expected, rel=tolerance)
        assert greedy == expected_greedy or tolerance > 1e-3


class LlamaCpp:
    """A GGUF file in llama.cpp, keys and values in float32."""

    def __init__(self, path: Path) -> None:
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx = parameters.n_batch = 256
        parameters.n_parallel = 1
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
        parameters.n_gpu_layers = 0
        parameters.warmup = False
        parameters.fit_params = False
        parameters.verbosity = 0
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = xllamacpp.Server(parameters)

    def score(self, context: Sequence[int], continuation: Sequence[int]) -> Score:
        """Score a continuation: its server knows no log probabilities of a prompt, but those of all
        tokens that may follow one.
        """
        total = 0.0
        greedy = True
        for count, token in enumerate(continuation):
            request = {
                "prompt": [*context, *continuation[:count]],
                "max_tokens": 1,
                "logprobs": 258,
                "temperature": 0,
                # Drawn is a letter of its own; what is measured is before the choice.
                "logit_bias": [[32, 100.0]],
            }
            answer = self._server.handle_completions(request)
            assert "error" not in answer, answer
            top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            found = {each["id"]: each["logprob"] for each in top}
            total += found[token]
            greedy = greedy and token == max(found, key=lambda each: found[each])
        return Score(total, greedy)


def likelihoods_of(model: Model, kit: Kit) -> list[tuple[float, bool]]:
    """Return what our adapter gives for each choice of each question."""
    requests: Any = [
        Kit(args=(each["question"], choice)) for each in kit.QUESTIONS for choice in each["choices"]
    ]
    return list(HarnessModel(model).loglikelihood(requests, disable_tqdm=True))


def test_transformers_and_the_server_give_our_number(
    run: Path, task_files: Path, tmp_path: Path, origin: str, kit: Kit
) -> None:
    ours = arb_ternary.evaluate_tasks(run, TASKS, include=task_files)["tasks"]
    likelihoods = likelihoods_of(load_model(run), kit)
    folder = tmp_path / "exported"
    export = ["export", str(run), str(folder), "--format", "hf", "-o", "layout=dense"]
    assert main([*export, "-o", "dtype=float32"]) == 0

    check(ours, likelihoods, by_transformers(folder, task_files), 1e-4)
    check(ours, likelihoods, by_server(origin, folder, task_files), 1e-4)


@pytest.mark.parametrize("kind", LLAMA_CPP)
def test_llama_cpp_gives_our_number(
    run: Path,
    task_files: Path,
    tmp_path: Path,
    kit: Kit,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    ours = arb_ternary.evaluate_tasks(run, TASKS, include=task_files)["tasks"]
    likelihoods = likelihoods_of(load_model(run), kit)
    file = tmp_path / "model.gguf"
    assert main(["export", str(run), str(file), "--format", "gguf", "--type", kind.lower()]) == 0
    other = LlamaCpp(file)

    def score(_: object, pairs: Sequence[Any], max_length: int) -> list[Score]:
        assert all(len(context) + len(rest) <= max_length + 1 for context, rest in pairs)
        return [other.score(context, rest) for context, rest in pairs]

    assert adapter.score_all is score_all
    monkeypatch.setattr(adapter, "score_all", score)
    theirs = arb_ternary.evaluate_tasks(run, TASKS, include=task_files)["tasks"]
    tolerance = LLAMA_CPP[kind]
    bits = ours["perplexity"]["metrics"]["bits_per_byte,none"]
    found = theirs["perplexity"]["metrics"]["bits_per_byte,none"]
    assert found == pytest.approx(bits, rel=tolerance)
    assert theirs["choice"]["metrics"]["acc,none"] == ours["choice"]["metrics"]["acc,none"]
    for one, two in zip(likelihoods_of(load_model(run), kit), likelihoods, strict=True):
        assert one[0] == pytest.approx(two[0], rel=tolerance)
