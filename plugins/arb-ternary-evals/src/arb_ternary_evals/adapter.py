"""A language model of this project as lm-evaluation-harness asks for one.

What is asked, in which order tokens are cut, and how windows are laid follow its model ``hf``, so
that an exported folder gets the same numbers there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from arb_ternary.errors import DataError, UsageProblem
from arb_ternary_chat.model import Model, unread_ids
from arb_ternary_evals.scoring import Scorer
from arb_ternary_text.data.tokenizers import encode_letters, encode_prompt
from arb_ternary_text.models.generate import (
    CachedReader,
    generate,
    streamed_text,
    text_until,
)

#: Options of a request that draws text; others are refused.
_DRAWING: Final = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}
#: Most tokens of an answer if a task does not say.
_LONGEST_ANSWER: Final = 256
#: Seed of each answer that is drawn.
_SEED: Final = 0

#: Texts of a request, and the ids of context and continuation.
Request = tuple[Any, Sequence[int], Sequence[int]]


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A model that answers the requests of tasks.

    Args:
        model: the model.

    Attributes:
        notes: decisions that a reader of the numbers has to know, one sentence each.
        windows: log-likelihood in nats and number of tokens of all texts of a rolling task, by
            name of the task.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model
        self._scorer = Scorer(model.causal, model.device)
        self.notes: list[str] = []
        self.windows: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))

    @property
    def max_length(self) -> int:
        """Number of tokens that the model reads."""
        return self._model.causal.max_length

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text; one stands before a text without a context."""
        return self.prefix_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text: the one that begins a text, else one that ends it.

        A tokenizer that has neither puts a newline there.

        Raises:
            UsageProblem: it has no single token for a newline, either.
        """
        special = self._model.special
        if special.bos is not None:
            return special.bos
        if special.eos:
            return min(special.eos)
        newline = encode_letters(self._model.tokenizer, "\n")
        if len(newline) != 1:
            raise UsageProblem(
                f"{self._model.source}: its tokenizer has no token that begins or ends a text, and "
                f"none for a newline, so there is nothing that a first token could follow"
            )
        note = "A newline stands before each text: the tokenizer has no token that begins a text."
        if note not in self.notes:
            self.notes.append(note)
        return newline[0]

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Encode letters, behind the token that begins every text of this model, if there is one.

        ``add_special_tokens=False`` leaves that token out.
        """
        if add_special_tokens is False:
            return encode_letters(self._model.tokenizer, string)
        return encode_prompt(self._model.tokenizer, string)

    # --- likelihoods

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], **_: object
    ) -> list[tuple[float, bool]]:
        found: dict[int, tuple[float, bool]] = {}
        order = sorted(range(len(requests)), key=lambda index: [*requests[index][1]])
        for index in order:
            texts, context, continuation = requests[index]
            self._check(texts, continuation)
            score = self._scorer.score(context, continuation)
            found[index] = (score.log_likelihood, score.greedy)
        return [found[index] for index in range(len(requests))]

    def _check(self, texts: Any, continuation: Sequence[int]) -> None:
        if len(continuation) > self.max_length:
            raise DataError(
                f"a continuation has {len(continuation)} tokens, and the model reads "
                f"{self.max_length}: {str(texts)[:60]}"
            )

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood in nats of each text, in disjoint windows."""
        found = []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            total = 0.0
            count = 0
            for window in windows:
                context, continuation = make_disjoint_window(window)
                total += self._scorer.score(context, continuation).log_likelihood
                count += len(continuation)
            found.append(total)
            nats, tokens = self.windows[str(request.task_name)]
            self.windows[str(request.task_name)] = (nats - total, tokens + count)
        return found

    # --- text

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the answer to each prompt, up to an end token or one of its stop strings.

        Raises:
            UsageProblem: a task asks for an option of drawing that there is not, or for more
                tokens than the model reads.
        """
        reader = CachedReader(self._model.causal, self._model.device)
        found: dict[int, str] = {}
        order = sorted(range(len(requests)), key=lambda index: str(requests[index].args[0]))
        for index in order:
            prompt, options = requests[index].args
            found[index] = self._answer(prompt, options, reader)
        return [found[index] for index in range(len(requests))]

    def _answer(self, prompt: str, options: Mapping[str, Any], reader: CachedReader) -> str:
        asked: dict[str, Any] = dict(normalize_gen_kwargs(dict(options), _LONGEST_ANSWER))
        unknown = asked.keys() - _DRAWING
        if unknown:
            raise UsageProblem(
                f"generation_kwargs: {', '.join(sorted(unknown))}: there is no such option of "
                f"drawing here",
                f"available: {', '.join(sorted(_DRAWING))}",
            )
        longest = asked["max_gen_toks"]
        if longest >= self.max_length:
            raise UsageProblem(
                f"max_gen_toks: {longest} tokens of an answer leave no room for a question in the "
                f"{self.max_length} that the model reads",
                "Set max_gen_toks in the task's generation_kwargs.",
            )
        ids = self.tok_encode(prompt)[-(self.max_length - longest) :]
        drawn = generate(
            self._model.causal,
            unread_ids(reader, ids),
            max_new_tokens=longest,
            temperature=float(asked.get("temperature", 0.0)) if asked["do_sample"] else 0.0,
            top_k=asked.get("top_k"),
            top_p=asked.get("top_p"),
            seed=_SEED,
            stop=self._model.special.eos,
            device=self._model.device,
            reader=reader,
        )
        stops = [stop for stop in asked["until"] if stop]
        return "".join(text_until(streamed_text(self._model.tokenizer, ids, drawn), stops))
