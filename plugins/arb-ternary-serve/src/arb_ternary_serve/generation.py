"""Draw the answers to a request: from what it asks for to the parts of their texts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from attrs import frozen

from arb_ternary.errors import ArbError
from arb_ternary_serve.problems import RequestProblem
from arb_ternary_serve.protocol import COMPLETION_TOKENS, Request
from arb_ternary_serve.sequence import Event, Options, TokenLogprobs
from arb_ternary_serve.text_stream import AnswerText, Part, prompt_tokens
from arb_ternary_serve.worker import ModelWorker, Ticket
from arb_ternary_text.chat.answers import encode_rendered
from arb_ternary_text.chat.template import Rendered


@frozen
class Prompt:
    """A prompt.

    Attributes:
        ids: what the model reads.
        text: what is repeated if the request wants that.
    """

    ids: Sequence[int]
    text: str


async def read_prompts(request: Request, worker: ModelWorker) -> list[Prompt]:
    """Return the prompts of a request. Long texts are encoded beside the event loop.

    Raises:
        RequestProblem: a text cannot be encoded, or the model has no turns.
    """
    tokenizer = worker.model.tokenizer
    try:
        if request.kind == "completion":
            return await asyncio.to_thread(_read_texts, request, worker)
        if worker.model.special.chat_template is None:
            raise RequestProblem(
                f"{worker.name}: the model has no chat template, so it knows no turns. Use "
                f"/v1/completions, which continue a text.",
                param="model",
            )
        # A template may take seconds; other threads stay free for other requests.
        async with worker.template_turn:
            rendered = await asyncio.to_thread(_render, request, worker)
        ids, _ = await asyncio.to_thread(encode_rendered, tokenizer, rendered)
        return [Prompt(ids, "")]
    except ArbError as error:
        raise RequestProblem.from_error(error) from error


def _render(request: Request, worker: ModelWorker) -> Rendered:
    try:
        return worker.model.template.render(request.messages, add_generation_prompt=True)
    except ArbError as error:
        raise RequestProblem(error.what, param="messages") from error


def _read_texts(request: Request, worker: ModelWorker) -> list[Prompt]:
    model = worker.model
    prompts = []
    for prompt in request.prompts:
        if isinstance(prompt, str):
            prompts.append(Prompt(model.encode(prompt), prompt))
        else:
            text = model.tokenizer.decode(list(prompt)) if request.echo else ""
            prompts.append(Prompt(prompt, text))
    return prompts


class Generation:
    """The answers to a request, as they are drawn.

    Args:
        request: what is asked for.
        prompts: its prompts.
        worker: draws the tokens.
        max_tokens: largest number of tokens of an answer that the server allows.

    Attributes:
        answers: the texts of the answers; ``n`` for each prompt in turn.

    Raises:
        RequestProblem: the request asks for too much, or too many others wait.
    """

    def __init__(
        self, request: Request, prompts: Sequence[Prompt], worker: ModelWorker, max_tokens: int
    ) -> None:
        self._request = request
        self._worker = worker
        self._prompts = [prompt for prompt in prompts for _ in range(request.n)]
        self._events: asyncio.Queue[tuple[int, Event | RequestProblem]] = asyncio.Queue()
        self.prompt_length = sum(len(prompt.ids) for prompt in prompts)
        if request.max_tokens is not None and request.max_tokens > max_tokens:
            raise RequestProblem(
                f"max_tokens: {request.max_tokens} are more than the {max_tokens} that this server "
                f"draws for an answer",
                param="max_tokens",
            )
        self._tickets = [
            Ticket(index, prompt.ids, self._options(index, prompt, max_tokens), self._events)
            for index, prompt in enumerate(self._prompts)
        ]
        worker.submit(self._tickets)
        tokenizer = worker.model.tokenizer
        self.answers = [
            AnswerText(
                tokenizer,
                prompt.ids,
                request.stop,
                length=len(prompt.text) if request.echo else 0,
                # Evaluation programs ask for a token behind the prompt, and drop the last one.
                with_end=request.echo,
            )
            for prompt in self._prompts
        ]

    @property
    def drawn(self) -> int:
        """Number of tokens that were drawn so far."""
        return sum(answer.drawn for answer in self.answers)

    async def parts(self) -> AsyncIterator[tuple[int, Part]]:
        """Yield parts of the answers, each with the index of its answer.

        Raises:
            RequestProblem: the model has failed.
        """
        left = set(range(len(self.answers)))
        begun: set[int] = set()
        while left:
            index, event = await self._events.get()
            if isinstance(event, RequestProblem):
                raise event
            if index not in left:
                continue
            if self._request.echo and index not in begun:
                yield index, self._echo(index, event.prompt_logprobs)
            begun.add(index)
            part = self.answers[index].push(event)
            if part.finish is not None:
                left.remove(index)
                self._worker.cancel(self._tickets[index])
            if part.text or part.tokens or part.finish is not None:
                yield index, part

    def cancel(self) -> None:
        """End all answers."""
        for ticket in self._tickets:
            self._worker.cancel(ticket)

    def _echo(self, index: int, logprobs: Sequence[TokenLogprobs] | None) -> Part:
        prompt = self._prompts[index]
        if logprobs is None:
            return Part(prompt.text, (), None)
        tokens = prompt_tokens(self._worker.model.tokenizer, prompt.ids, logprobs)
        return Part(prompt.text, tokens, None)

    def _options(self, index: int, prompt: Prompt, max_tokens: int) -> Options:
        request = self._request
        wanted = request.max_tokens
        if wanted is None:
            usual = COMPLETION_TOKENS if request.kind == "completion" else max_tokens
            wanted = max(1, self._worker.room(len(prompt.ids), min(usual, max_tokens)))
        seed = request.seed
        if seed is not None:
            seed += index % request.n
        return Options(
            max_new_tokens=wanted,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            seed=seed,
            stop=self._worker.model.special.eos,
            logprobs=request.logprobs,
            prompt_logprobs_from=1 if request.echo and request.logprobs is not None else None,
        )
