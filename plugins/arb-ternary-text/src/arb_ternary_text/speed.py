"""Speed of a model: tokens read and written per second, and the share of the read bandwidth.

A model that writes one token reads all of its weights once, so the rate at which memory can be read
bounds the rate of tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from attrs import frozen
from torch import Tensor, nn

from arb_ternary.backends.select import get_backend
from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.embedding import TernaryEmbedding
from arb_ternary_text.models.cache import CacheNumbers, KeyValueCache
from arb_ternary_text.models.experts import Experts
from arb_ternary_text.models.generate import CachedModel, cache_format, cache_maker
from arb_ternary_text.models.parts import TiedHead

#: Bytes of the buffer that is read to measure the bandwidth: more than caches hold.
_BUFFER_BYTES: Final = 512 << 20
_READINGS: Final = 5


@frozen(kw_only=True)
class Case:
    """One measurement: ``batch`` sequences read ``prompt`` tokens each, then write ``new_tokens``.

    Attributes:
        threads: threads of torch and of the native kernels.
    """

    threads: int
    batch: int
    prompt: int
    new_tokens: int


@frozen(kw_only=True)
class Speed:
    """Result of a case.

    Attributes:
        prompt_rates: tokens of prompts read per second, over the batch, by repetition.
        decode_rates: tokens written per second, over the batch, by repetition.
        bytes_per_token: bytes that one step of writing reads: weights, and the cache half-way.
    """

    case: Case
    prompt_rates: Sequence[float]
    decode_rates: Sequence[float]
    bytes_per_token: int | None

    def read_rate(self) -> float | None:
        """Return the bytes per second that writing reads."""
        if self.bytes_per_token is None:
            return None
        return self.bytes_per_token * statistics.mean(self.decode_rates) / self.case.batch


def check_cases(model: nn.Module, cases: Sequence[Case], name: str) -> CachedModel:
    """Check that a model can run the cases, and return it.

    Raises:
        UsageProblem: it keeps no keys and values, or its context is too short.
    """
    if not isinstance(model, CachedModel):
        raise UsageProblem(f"the model {name!r} does not write tokens one by one: no new_cache()")
    longest = max(cases, key=lambda case: case.prompt + case.new_tokens)
    length = longest.prompt + longest.new_tokens
    if model.sliding_window is None and length > model.max_length:
        raise UsageProblem(
            f"--prompt {longest.prompt} and --new-tokens {longest.new_tokens} are {length} tokens, "
            f"but the context of the model holds {model.max_length}",
            f"Together they may be at most {model.max_length}.",
        )
    return model


@torch.no_grad()
def measure(
    model: CachedModel,
    case: Case,
    *,
    device: torch.device,
    cache: CacheNumbers | None,
    repetitions: int,
    advance: Callable[[], None],
) -> Speed:
    """Measure a case, after one repetition that does not count.

    Args:
        model: in evaluation mode, on ``device``.
        cache: format of keys and values; None: the one that ``arb generate`` takes.
        repetitions: how often prompts are read and tokens written.
        advance: called after each repetition, the first one included.

    Raises:
        UsageProblem: the model cannot keep keys and values in that format.
    """
    torch.set_num_threads(case.threads)
    new_cache = cache_maker(model, cache_format(model, cache), case.batch)
    generator = torch.Generator().manual_seed(0)
    size = (case.batch, case.prompt)
    prompt_BS = torch.randint(model.vocabulary_size, size, generator=generator).to(device)
    prompt_rates = []
    decode_rates = []
    cached = 0
    for repetition in range(repetitions + 1):
        keys = new_cache()
        begun = time.perf_counter()
        token_B1 = _next_tokens(model, prompt_BS, keys)
        read = time.perf_counter()
        for _ in range(case.new_tokens):
            token_B1 = _next_tokens(model, token_B1, keys)
        written = time.perf_counter()
        advance()
        if repetition:
            prompt_rates.append(case.batch * case.prompt / (read - begun))
            decode_rates.append(case.batch * case.new_tokens / (written - read))
        cached = keys.bytes_per_token() * (case.prompt + case.new_tokens // 2) * case.batch
    weights = weight_bytes_per_token(model)
    return Speed(
        case=case,
        prompt_rates=prompt_rates,
        decode_rates=decode_rates,
        bytes_per_token=None if weights is None else weights + cached,
    )


def _next_tokens(model: Any, tokens_BS: Tensor, cache: KeyValueCache) -> Tensor:
    """Read tokens and return the likeliest next ones, ``[B, 1]``; the work is done on return."""
    if hasattr(model, "next_logits"):
        logits_BV = model.next_logits(tokens_BS, cache)
    else:
        logits_BV = model(tokens_BS, cache)[:, -1]
    likeliest_B1: Tensor = logits_BV.argmax(dim=-1, keepdim=True)
    likeliest_B1[0, 0].item()  # waits for a GPU
    return likeliest_B1


def weight_bytes_per_token(model: Any) -> int | None:
    """Return the bytes of weights that one step reads; None for experts, which depend on the token.

    An embedding that is not the head as well is looked up, not read.
    """
    modules = list(model.modules())
    if any(isinstance(module, Experts) for module in modules):
        return None
    tied = any(isinstance(module, TiedHead) for module in modules)
    looked_up = 0
    for module in modules:
        if isinstance(module, nn.Embedding | TernaryEmbedding) and not tied:
            looked_up += sum(tensor.nbytes for tensor in _tensors(module))
    return sum(tensor.nbytes for tensor in _tensors(model)) - looked_up


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers."""
    return sum(tensor.nbytes for tensor in _tensors(model))


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def read_bandwidth(backend: str, device: torch.device, threads: int) -> float:
    """Measure the bytes per second at which memory can be read.

    The backend's ``probe_read`` reads the buffer if there is one, as on the CPU; otherwise torch
    adds it up. The best of a few readings counts.
    """
    torch.set_num_threads(threads)
    buffer = torch.zeros(_BUFFER_BYTES // 8, dtype=torch.int64, device=device)
    probe = getattr(get_backend(backend), "probe_read", None) if device.type == "cpu" else None
    raw = buffer.view(torch.uint8)
    rates = []
    for _ in range(_READINGS):
        begun = time.perf_counter()
        if probe is None:
            buffer.sum().item()
        else:
            probe(raw)
        rates.append(buffer.nbytes / (time.perf_counter() - begun))
    return max(rates)
