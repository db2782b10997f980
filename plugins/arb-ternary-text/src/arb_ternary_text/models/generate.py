"""Sampling of text, one token at a time.

Only the latest tokens of a prompt that exceeds the context are read. When generation reaches the
end of the context, the model reads the latest half of it again and goes on, so that a text of any
length can be drawn. A model with a sliding window needs neither: it reads prompts of any length in
chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import Tensor

from arb_ternary.errors import UsageProblem
from arb_ternary_text.data.tokenizers import Tokenizer
from arb_ternary_text.models.cache import CacheNumbers, KeyValueCache

#: Tokens of a prompt that are decoded with the first new token.
_CONTEXT_IDS: Final = 16
#: Tokens that are ranked first to find those that reach ``top_p``.
_CANDIDATES: Final = 256


@runtime_checkable
class CachedModel(Protocol):
    """A model that :func:`generate` can run.

    Two more attributes are used if there are any: ``cache_numbers``, the formats of keys and values
    that ``new_cache(batch_size, numbers)`` can make, and ``next_logits(tokens, cache)``, which
    returns the logits after the last position only. For a long prompt that saves most of the head's
    work.
    """

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def max_length(self) -> int: ...

    @property
    def sliding_window(self) -> int | None: ...

    def new_cache(self, batch_size: int) -> KeyValueCache: ...

    def __call__(self, tokens_BS: Tensor, cache: KeyValueCache) -> Tensor: ...


def generate(
    model: CachedModel,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: Collection[int] = (),
    device: torch.device | str = "cpu",
    cache: CacheNumbers | None = None,
    reader: CachedReader | None = None,
) -> Iterator[int]:
    """Yield the token ids that follow ``prompt_ids``, each as soon as it is drawn.

    Args:
        model: a causal model.
        prompt_ids: at least one token id.
        max_new_tokens: largest number of ids to draw.
        temperature: divides the logits; 0 takes the most likely token (the first of equals).
        top_k: draw among the ``top_k`` most likely tokens only; None = all.
        top_p: draw among the most likely tokens that together reach this probability (Holtzman et
            al., 2020), after ``top_k``; None = all.
        seed: seed of the draws, the same on every device; None = a different one every time.
        stop: ids that end the text; they are not yielded.
        device: the device of the model.
        cache: format of the cached keys and values: ``bfloat16``
            (:class:`~arb_ternary_text.models.cache.Bfloat16LayerCache`), ``float``, the dtype of
            the model, or ``int8``, about half the memory of bfloat16
            (:class:`~arb_ternary_text.models.cache.Int8LayerCache`). None: bfloat16 if the model
            can keep them so, or else float.
        reader: continues the text that this reader of the model has read, with its device and
            cache; None = begin a text.

    Raises:
        UsageProblem: a value is out of range, or the model cannot make such a cache. It is raised
            by the call, not when the first id is asked for.
    """
    check_sampling(temperature, top_k, top_p)
    if max_new_tokens < 0:
        raise UsageProblem(f"max_new_tokens: must be at least 0, not {max_new_tokens}")
    check_ids(prompt_ids, stop, model.vocabulary_size)
    generator = seeded_generator(seed)
    used = reader or CachedReader(model, device, cache)

    def drawn() -> Iterator[int]:
        unread = list(prompt_ids)
        for _ in range(max_new_tokens):
            probability_V = next_token_probabilities(used.read(unread), temperature, top_k, top_p)
            token = draw_token(probability_V, generator)
            if token in stop:
                return
            yield token
            unread = [token]

    return drawn()


def seeded_generator(seed: int | None) -> torch.Generator:
    """Return a generator on the host; None seeds it differently every time."""
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def cache_format(model: CachedModel, asked: CacheNumbers | None) -> CacheNumbers:
    """Return the format of keys and values that is asked for.

    None: bfloat16 if the model can keep them so, or else float.
    """
    if asked is not None:
        return asked
    formats: Collection[str] = getattr(model, "cache_numbers", ())
    return "bfloat16" if "bfloat16" in formats else "float"


def cache_maker(
    model: CachedModel, numbers: CacheNumbers, batch_size: int = 1
) -> Callable[[], KeyValueCache]:
    """Return a function that makes an empty cache for ``batch_size`` sequences.

    Raises:
        UsageProblem: the model cannot make such a cache.
    """
    formats: Collection[str] | None = getattr(model, "cache_numbers", None)
    if formats is None and numbers == "float":
        return partial(model.new_cache, batch_size)
    if formats is None or numbers not in formats:
        raise UsageProblem(
            f"cache: {type(model).__name__} keeps keys and values as "
            f"{' or '.join(formats or ['float'])}, not as {numbers!r}"
        )
    return partial(model.new_cache, batch_size, numbers)  # type: ignore[call-arg]


def next_token_probabilities(
    logits_V: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Return the distribution from which :func:`generate` draws, float64 ``[V]``.

    Of equal logits the lower id counts as more likely.

    Raises:
        UsageProblem: a value is out of range.
    """
    check_sampling(temperature, top_k, top_p)
    logits_V = logits_V.detach().to(device="cpu", dtype=torch.float64)
    most_likely = logits_V.argmax()  # the first of equals
    if temperature == 0:
        certain_V = torch.zeros_like(logits_V)
        certain_V[most_likely] = 1.0
        return certain_V
    # Only differences matter, and dividing the largest, which is then 0, cannot overflow.
    scaled_V = (logits_V - logits_V[most_likely]) / temperature
    if top_p is None and (top_k is None or top_k >= logits_V.numel()):
        kept_V = scaled_V.softmax(dim=0)
        return kept_V / kept_V.sum()

    if top_k is None and top_p is not None:
        ranked_K, kept_K = _likeliest(logits_V, scaled_V.softmax(dim=0), top_p)
    else:
        ranked_K = ranked_tokens(logits_V, top_k)
        kept_K = scaled_V[ranked_K].softmax(dim=0)
    if top_p is not None:
        # A token stays if those before it have not reached top_p; the most likely always stays.
        before_K = kept_K.cumsum(dim=0) - kept_K
        kept_K = torch.where(before_K < top_p, kept_K, 0.0)
    probability_V = torch.zeros_like(logits_V)
    probability_V[ranked_K] = kept_K / kept_K.sum()
    return probability_V


def _likeliest(logits_V: Tensor, probability_V: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Return ids, the most likely first, that together reach ``top_p``, and their probabilities.

    They are a few hundred, or many times as many where those do not reach it, because sorting a
    large vocabulary takes as long as decoding a token.
    """
    count = _CANDIDATES
    while True:
        ranked_K = ranked_tokens(logits_V, count)
        kept_K = probability_V[ranked_K]
        if count >= logits_V.numel() or kept_K.cumsum(dim=0)[-1] >= top_p:
            return ranked_K, kept_K
        count *= 8


def ranked_tokens(logits_V: Tensor, count: int | None) -> Tensor:
    """Return the ids of the ``count`` most likely tokens (None: all), the most likely first.

    Of equals the lower id comes first.
    """
    if count is None or count >= logits_V.numel():
        return logits_V.sort(descending=True, stable=True).indices
    if count == 1:
        return logits_V.argmax(dim=0, keepdim=True)  # the first of equals
    # Sorting a large vocabulary takes as long as decoding a token, so only the candidates are
    # sorted.
    least = logits_V.topk(count).values[-1]
    candidates = (logits_V < least).logical_not_().nonzero().flatten()
    return candidates[logits_V[candidates].sort(descending=True, stable=True).indices[:count]]


class CachedReader:
    """Feeds tokens to a model through a cache that stays within the context.

    Args:
        model: a causal model.
        device: the device of the model.
        cache: format of the cached keys and values, as for :func:`generate`.

    Attributes:
        seen: the ids that the cache holds; of a model with a sliding window, all that were read.

    Raises:
        UsageProblem: the model cannot make such a cache.
    """

    def __init__(
        self,
        model: CachedModel,
        device: torch.device | str = "cpu",
        cache: CacheNumbers | None = None,
    ) -> None:
        self._model = model
        self._next_logits: Any = getattr(model, "next_logits", None)
        self._device = torch.device(device)
        self._new_cache = cache_maker(model, cache_format(model, cache))
        self._cache = self._new_cache()
        self.seen: list[int] = []

    def rewind(self, length: int) -> None:
        """Forget all but the first ``length`` tokens of ``seen``, or all of them.

        A cache with a sliding window has dropped what would be needed again, so it forgets all.
        """
        if length >= len(self.seen):
            return
        if self._model.sliding_window is None and length:
            self._cache.rewind(length)
            del self.seen[length:]
        else:
            self._cache = self._new_cache()
            self.seen = []

    def keep(self, ids: Sequence[int]) -> int:
        """Forget what was read and differs from ``ids``; return how many of them are held."""
        self.rewind(common_length(ids, self.seen))
        return len(self.seen)

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        """Read more ids, which fit into the context; return the logits ``[S, V]`` after each."""
        self.seen += ids
        return self._model(self._tokens(ids), self._cache)[0]

    def read(self, ids: list[int]) -> Tensor:
        """Read more ids; return the logits ``[V]`` of the next token."""
        context = self._model.max_length
        if self._model.sliding_window is None and len(self.seen) + len(ids) > context:
            # A long prompt fills all of the context; later half of it stays free for new
            # tokens.
            kept = max(1, context // 2) if self.seen else context
            ids = [*self.seen, *ids][-kept:]
            self.seen = []
            self._cache = self._new_cache()
        self.seen += ids
        for first in range(0, len(ids), context):
            logits_V = self._forward(ids[first : first + context])
        return logits_V

    # A decorator, because a `with` around the loop of the generator would leak into the caller
    # between ids.
    @torch.no_grad()
    def _forward(self, ids: list[int]) -> Tensor:
        tokens_1S = self._tokens(ids)
        if self._next_logits is not None:
            last_1V: Tensor = self._next_logits(tokens_1S, self._cache)
            return last_1V[0]
        return self._model(tokens_1S, self._cache)[0, -1]

    def _tokens(self, ids: list[int]) -> Tensor:
        return torch.tensor([ids], dtype=torch.int64, device=self._device)


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many ids two sequences have in common from the beginning on."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return length


def draw_token(probability_V: Tensor, generator: torch.Generator) -> int:
    """Draw an id by inverting the cumulative distribution; it never has probability 0."""
    cumulative_V = probability_V.cumsum(dim=0)
    uniform = torch.rand((), dtype=torch.float64, generator=generator) * cumulative_V[-1]
    return int(torch.searchsorted(cumulative_V, uniform, right=True))


def check_ids(prompt_ids: Sequence[int], stop: Collection[int], vocabulary_size: int) -> None:
    """Check the ids of a prompt, and those that end a text.

    Raises:
        UsageProblem: the prompt is empty, or an id is outside the vocabulary.
    """
    if not prompt_ids:
        raise UsageProblem(
            "prompt: must have at least one token", "Give a prompt that is not empty."
        )
    for name, ids in (("prompt", prompt_ids), ("stop", stop)):
        for token in ids:
            if not 0 <= token < vocabulary_size:
                raise UsageProblem(
                    f"{name}: token ids must be from 0 to {vocabulary_size - 1}, not {token}"
                )


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Check the options of a draw.

    Raises:
        UsageProblem: a value is out of range.
    """
    if not (math.isfinite(temperature) and temperature >= 0):
        raise UsageProblem(
            f"temperature: must be a finite number of at least 0, not {temperature}",
            "0 takes the most likely token.",
        )
    if top_k is not None and top_k < 1:
        raise UsageProblem(
            f"top_k: must be at least 1, not {top_k}", "Leave it out to draw among all tokens."
        )
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageProblem(
            f"top_p: must be above 0 and at most 1, not {top_p}",
            "Leave it out to draw among all tokens.",
        )


class TextStream:
    """Writes the text of ids, one after another.

    A character that spans several tokens appears when it is complete. Only the last tokens are
    decoded again for each new one: those of the last piece, because some decoders write a token
    differently at the beginning of a text, and those that follow them.

    Args:
        tokenizer: decodes the ids.
        prompt_ids: the ids before the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._recent = list(prompt_ids[-_CONTEXT_IDS:])
        self._text = tokenizer.decode(self._recent)
        self._shown = self._text
        # A piece of text begins with the token after the first `known` ones; none if the prompt may
        # have ended within a character.
        self._known = 0 if self._text.endswith("\ufffd") else len(self._recent)

    def push(self, token: int) -> str:
        """Return the text that is complete with one more id; it may be empty."""
        self._recent.append(token)
        self._text = self._tokenizer.decode(self._recent)
        whole = self._text.rstrip("\ufffd")
        if not whole.startswith(self._shown):
            # The prompt ended within a character.
            self._shown = self._shown.rstrip("\ufffd")
        if not whole.startswith(self._shown):
            return ""
        piece = whole[len(self._shown) :]
        if piece:
            self._shown = whole
        if piece and whole == self._text:
            self._recent = self._recent[self._known :]
            self._known = len(self._recent)
            self._text = self._tokenizer.decode(self._recent)
            self._shown = self._text
        return piece

    def end(self) -> str:
        """Return the rest: a character that was not completed."""
        return self._text[len(self._shown) :] if self._text.startswith(self._shown) else ""


class StopText:
    """Passes text on up to the first stop string, which is left out.

    The end of what was read is held back while it may be the beginning of a stop string.

    Args:
        stops: the stop strings.

    Attributes:
        found: whether there was a stop string. What follows it is not passed on.

    Raises:
        UsageProblem: a stop string is empty.
    """

    def __init__(self, stops: Collection[str]) -> None:
        if "" in stops:
            raise UsageProblem("stop: a stop string must not be empty")
        self._stops = stops
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """Return the text that can be passed on after one more piece; it may be empty."""
        if self.found:
            return ""
        text = self._held + piece
        places = [place for place in map(text.find, self._stops) if place >= 0]
        if places:
            self.found = True
            return text[: min(places)]
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def end(self) -> str:
        """Return the rest: what might have been the beginning of a stop string."""
        return "" if self.found else self._held


def streamed_text(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], drawn: Iterable[int]
) -> Iterator[str]:
    """Yield the text of ``drawn`` piece by piece, as :class:`TextStream` writes it."""
    stream = TextStream(tokenizer, prompt_ids)
    yield from filter(None, map(stream.push, drawn))
    rest = stream.end()
    if rest:
        yield rest


def text_until(pieces: Iterable[str], stops: Collection[str]) -> Iterator[str]:
    """Yield ``pieces`` up to the first stop string, as :class:`StopText` passes them on.

    Raises:
        UsageProblem: a stop string is empty. It is raised by the call.
    """
    passed_on = StopText(stops)

    def passed() -> Iterator[str]:
        for piece in pieces:
            ready = passed_on.push(piece)
            if ready:
                yield ready
            if passed_on.found:
                return
        rest = passed_on.end()
        if rest:
            yield rest

    return passed()


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that begins ``stop``."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
