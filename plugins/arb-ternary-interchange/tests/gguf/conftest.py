"""GGUF files of small decoders, and llama.cpp to run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import xllamacpp

from arb_ternary_interchange.gguf.exporter import GgufExporter
from arb_ternary_interchange.gguf.importer import GgufImporter
from arb_ternary_interchange.options import GgufConfig, ImportConfig
from arb_ternary_interchange.protocols import ImportedModel
from arb_ternary_text.models.decoder import Decoder


@pytest.fixture(scope="session")
def make_decoder(make_decoder: Callable[..., Decoder]) -> Callable[..., Decoder]:
    """Make a decoder whose matrices fit every type of tensor."""

    def make(architecture: str, vocabulary_size: int = 256, **options: Any) -> Decoder:
        sizes: dict[str, Any] = {"width": 256, "feed_forward": 512, "max_length": 256}
        if architecture == "bitnet":
            sizes["kv_heads"] = None
        return make_decoder(architecture, vocabulary_size, **{**sizes, **options})

    return make


@pytest.fixture
def export(tmp_path: Path) -> Callable[..., Path]:
    """Write a decoder to a file."""

    def write(
        model: torch.nn.Module,
        kind: str = "auto",
        tokenizer: Mapping[str, Any] | None = None,
        name: str = "m",
        float_kind: str = "auto",
    ) -> Path:
        path = tmp_path / f"{name}-{kind}-{float_kind}.gguf"
        metadata = {"name": name, "step": 1, "tokenizer": tokenizer or {"kind": "bytes"}}
        GgufExporter(GgufConfig(type=kind, float_type=float_kind)).export(model, path, metadata)
        return path

    return write


class LlamaCpp:
    """One file in llama.cpp, keys and values in float32 (float16 is its default)."""

    def __init__(
        self, path: Path, *, exact_cache: bool = True, context: int = 256, space: int = 32
    ) -> None:
        self.space = space  # the id of a character of its own
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(path)
        parameters.n_ctx = context
        parameters.n_batch = context
        parameters.n_parallel = 1
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
        parameters.n_gpu_layers = 0
        parameters.warmup = False
        parameters.fit_params = False
        parameters.cache_ram_mib = 0
        parameters.verbosity = 0
        if exact_cache:
            parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            parameters.flash_attn_type = (
                xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
            )
        self.server = xllamacpp.Server(parameters)

    def log_probabilities(self, prompt: str | Sequence[int], count: int = 256) -> torch.Tensor:
        """Return the log probabilities of all ``count`` tokens after ``prompt``, float64."""
        # The chosen token has to be a character of its own; what is measured is before the choice.
        request = {
            "prompt": prompt,
            "max_tokens": 1,
            "logprobs": count,
            "temperature": 0,
            "logit_bias": [[self.space, 100.0]],
        }
        answer = self.server.handle_completions(request)
        assert "error" not in answer, answer
        top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        found = {entry["id"]: entry["logprob"] for entry in top}
        return torch.tensor([found[i] for i in range(count)], dtype=torch.float64)

    def generate(self, prompt: str, tokens: int) -> str:
        """Return the most likely continuation."""
        request = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
        return str(self.server.handle_completions(request)["choices"][0]["text"])

    def reads_as(self, text: str, ids: Sequence[int]) -> bool:
        """Whether ``text`` is as many tokens as ``ids``, and followed by the same as these.

        The server reports tokens only over a connection, which tests do not make.
        """
        request = {
            "max_tokens": 1,
            "logprobs": 50,
            "temperature": 0,
            "logit_bias": [[self.space, 100.0]],
        }
        both = [
            self.server.handle_completions({"prompt": prompt, **request})
            for prompt in (text, list(ids))
        ]
        counts = [answer["usage"]["prompt_tokens"] for answer in both]
        top = [answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] for answer in both]
        first, second = ({entry["id"]: entry["logprob"] for entry in found} for found in top)
        common = first.keys() & second.keys()
        near = all(abs(first[i] - second[i]) < 1e-3 for i in common)
        return counts == [len(ids), len(ids)] and len(common) > 45 and near


@pytest.fixture
def llama_cpp() -> Callable[..., LlamaCpp]:
    """Open a file in llama.cpp."""
    return LlamaCpp


@pytest.fixture(scope="session")
def ours() -> Callable[..., torch.Tensor]:
    """Return log probabilities of a decoder after each token of a text, ``[S, V]``, with int8 or
    float activations.
    """

    def compute(model: Decoder, ids: Sequence[int], activations: str) -> torch.Tensor:
        for module in model.modules():
            if hasattr(module, "activations"):
                module.activations = activations
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([list(ids)]))[0].double(), dim=-1)

    return compute


@pytest.fixture(scope="session")
def load(built: Callable[..., Decoder]) -> Callable[..., tuple[Decoder, ImportedModel]]:
    """Import a file and return the filled model and what the importer has read. ``changes`` are
    made to the model's options; keyword arguments are options of the importer.
    """

    def read(path: Path, changes: Any = None, **options: Any) -> tuple[Decoder, ImportedModel]:
        found = GgufImporter(ImportConfig(**options)).load(path)
        return built(found, **(changes or {})), found

    return read
