"""A language model of this project as lm-evaluation-harness asks for one.

What is asked, in which order tokens are cut, and how windows are laid follow its model ``hf``, so
that an exported folder gets the same numbers there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from attrs import define, field
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from arb_ternary.errors import DataError, UsageProblem
from arb_ternary_chat.model import Model
from arb_ternary_evals.batches import Work, make_engine, run_together, score_all
from arb_ternary_serve.engine import Engine
from arb_ternary_serve.sequence import Event, Options
from arb_ternary_text.chat.answers import encode_rendered
from arb_ternary_text.chat.template import Message, RefusedConversationError, Rendered
from arb_ternary_text.data.tokenizers import encode_letters, encode_prompt
from arb_ternary_text.models.generate import StopText, TextStream

#: Options of a request that draws text; others are refused.
_DRAWING: Final = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}
#: Most tokens of an answer if a task does not say.
_LONGEST_ANSWER: Final = 256
#: Seed of each answer that is drawn.
_SEED: Final = 0
#: Stands behind the beginning of an answer while a template writes it. The space tells whether
#: the template trims messages.
_GOES_ON: Final = "ANSWER_GOES_ON_HERE "

#: Texts of a request, and the ids of context and continuation.
Request = tuple[Any, Sequence[int], Sequence[int]]


@define
class Measured:
    """Sums over the texts of a rolling task.

    Attributes:
        nats: their negative log-likelihood.
        tokens: number of their tokens.
        size: number of their bytes in UTF-8.
    """

    nats: float = 0.0
    tokens: int = 0
    size: int = 0


@define
class Answer:
    """An answer that is being drawn.

    Attributes:
        stream: writes the text of its tokens.
        stop: ends it.
        pieces: its text.
    """

    stream: TextStream
    stop: StopText
    pieces: list[str] = field(factory=list)

    def receive(self, event: Event) -> bool:
        """Take a token; return whether the answer goes on."""
        if event.token is not None:
            self.pieces.append(self.stop.push(self.stream.push(event.token)))
        if event.finished is not None:
            self.pieces += [self.stop.push(self.stream.end()), self.stop.end()]
        return not self.stop.found


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A model that answers the requests of tasks.

    Args:
        model: the model.
        chat: whether requests are conversations that the model's template has written.

    Attributes:
        notes: decisions that a reader of the numbers has to know, one sentence each.
        rolling: what was measured of each rolling task, by its name.
    """

    def __init__(self, model: Model, *, chat: bool = False) -> None:
        super().__init__()
        self._model = model
        self._chat = chat
        self.notes: list[str] = []
        self.rolling: dict[str, Measured] = defaultdict(Measured)

    @cached_property
    def _engine(self) -> Engine:
        return make_engine(self._model)

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
        self._note("A newline stands before each text: the tokenizer has no token that begins one.")
        return newline[0]

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Encode text, behind the token that begins every text of this model, if there is one.

        ``add_special_tokens=False`` leaves that token out. What spells a control token is letters,
        except in conversations, where templates write such tokens.
        """
        if self._chat:
            return self._encode_conversation(string, add_special_tokens is not False)
        if add_special_tokens is False:
            return encode_letters(self._model.tokenizer, string)
        return encode_prompt(self._model.tokenizer, string)

    def _encode_conversation(self, text: str, begins: bool) -> list[int]:
        ids = encode_rendered(self._model.tokenizer, Rendered(text))[0]
        prefix = self._model.special.prefix
        # Many templates write the token themselves.
        if begins and ids[: len(prefix)] != prefix:
            return [*prefix, *ids]
        return ids

    # --- conversations

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer in the harness's caches of requests, which are not used here."""
        return self._model.source

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the model's own template, which is the only one."""
        return self._model.special.chat_template or ""

    def apply_chat_template(
        self, chat_history: Sequence[Message], add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a conversation.

        A system message is left out if the template refuses one.

        Args:
            chat_history: the messages.
            add_generation_prompt: whether the beginning of an answer follows. If not, the last
                message is the beginning of one, and goes on.
        """
        try:
            return self._render(chat_history, add_generation_prompt)
        except RefusedConversationError:
            kept = [each for each in chat_history if each["role"] != "system"]
            if len(kept) == len(chat_history):
                raise
            self._note("System messages were left out: the chat template refuses them.")
            return self._render(kept, add_generation_prompt)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        template = self._model.template
        if add_generation_prompt:
            return template.render(messages, add_generation_prompt=True).text
        *before, last = messages
        marked = {**last, "content": last["content"] + _GOES_ON}
        text, mark, after = template.render([*before, marked]).text.rpartition(_GOES_ON.strip())
        if not mark:
            raise DataError(
                f"{template.name} does not write the last message as it is, so that an answer "
                f"cannot begin with {last['content']!r}"
            )
        # A template that trims messages trims the space behind the mark.
        return text if after.startswith(" ") else text.rstrip()

    # --- likelihoods

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], **_: object
    ) -> list[tuple[float, bool]]:
        for texts, _context, continuation in requests:
            self._check(texts, continuation)
        pairs = [(context, continuation) for _, context, continuation in requests]
        return list(score_all(self._engine, pairs, self.max_length))

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
        pairs: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for index, request in enumerate(requests):
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs += [make_disjoint_window(window) for window in windows]
            owners += [index] * (len(pairs) - len(owners))
            measured = self.rolling[str(request.task_name)]
            measured.size += len(text.encode())

        found = [0.0] * len(requests)
        scores = score_all(self._engine, pairs, self.max_length)
        for index, (_, continuation), score in zip(owners, pairs, scores, strict=True):
            found[index] += score.log_likelihood
            measured = self.rolling[str(requests[index].task_name)]
            measured.nats -= score.log_likelihood
            measured.tokens += len(continuation)
        return found

    # --- text

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the answer to each prompt, up to an end token or one of its stop strings.

        Raises:
            UsageProblem: a task asks for an option of drawing that there is not, or for more
                tokens than the model reads.
        """
        works = []
        answers = []
        for request in requests:
            prompt, options = request.args
            asked = self._asked(options)
            work = self._work(prompt, asked)
            works.append(work)
            stream = TextStream(self._model.tokenizer, work.ids)
            stop = StopText([each for each in asked["until"] if each])
            answers.append(Answer(stream, stop))
        run_together(self._engine, works, lambda index, event: answers[index].receive(event))
        return ["".join(answer.pieces) for answer in answers]

    def _asked(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a request under the harness's own names.

        Raises:
            UsageProblem: there is no such option here, or no room for such an answer.
        """
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
        return asked

    def _work(self, prompt: str, asked: Mapping[str, Any]) -> Work:
        longest = asked["max_gen_toks"]
        return Work(
            self.tok_encode(prompt)[-(self.max_length - longest) :],
            Options(
                max_new_tokens=longest,
                temperature=float(asked.get("temperature", 0.0)) if asked["do_sample"] else 0.0,
                top_k=asked.get("top_k"),
                top_p=asked.get("top_p"),
                seed=_SEED,
                stop=self._model.special.eos,
            ),
        )
