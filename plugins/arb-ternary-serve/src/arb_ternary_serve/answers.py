"""Answers in the form of the OpenAI API, whole and in pieces."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from arb_ternary_serve.protocol import Request
from arb_ternary_serve.sequence import Finish
from arb_ternary_serve.text_stream import Part, Token, TokenNames

#: The least log probability that is reported: JSON knows no infinity.
_LEAST = -9999.0

Json = dict[str, Any]


def usage(prompt: int, drawn: int) -> Json:
    """Return the numbers of tokens of a request: of its prompts, and those drawn for it."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": drawn,
        "total_tokens": prompt + drawn,
    }


def joined(parts: Sequence[Part]) -> Part:
    """Return a whole answer."""
    text = "".join(part.text for part in parts)
    tokens = tuple(token for part in parts for token in part.tokens)
    return Part(text, tokens, parts[-1].finish)


class Form(ABC):
    """The form of the answers to one request.

    Args:
        request: what was asked for.
        model: id of the model.
        names: texts of its tokens.
    """

    prefix: str
    whole: str
    piece: str

    def __init__(self, request: Request, model: str, names: TokenNames) -> None:
        self._request = request
        self._model = model
        self._names = names
        self._id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def response(self, answers: Sequence[Part], used: Json) -> Json:
        """Return the whole response."""
        choices = [self._whole_choice(index, answer) for index, answer in enumerate(answers)]
        return {**self._frame(self.whole), "choices": choices, "usage": used}

    def beginning(self, index: int) -> list[Json]:
        """Return what a stream has before the first part of an answer."""
        del index
        return []

    def chunk(self, index: int, part: Part) -> Json:
        """Return a part of an answer of a stream."""
        return self._chunk([self._part_choice(index, part)])

    def usage_chunk(self, used: Json) -> Json:
        """Return the last chunk of a stream."""
        return {**self._frame(self.piece), "choices": [], "usage": used}

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = {**self._frame(self.piece), "choices": choices}
        if self._request.include_usage:
            chunk["usage"] = None
        return chunk

    def _frame(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _whole_choice(self, index: int, answer: Part) -> Json:
        return self._part_choice(index, answer)

    @abstractmethod
    def _part_choice(self, index: int, part: Part) -> Json: ...


class CompletionForm(Form):
    """The form of ``/v1/completions``."""

    prefix = "cmpl"
    whole = "text_completion"
    piece = "text_completion"

    def _part_choice(self, index: int, part: Part) -> Json:
        logprobs = None if self._request.logprobs is None else self._logprobs(part.tokens)
        return {
            "index": index,
            "text": part.text,
            "logprobs": logprobs,
            "finish_reason": part.finish,
        }

    def _logprobs(self, tokens: Sequence[Token]) -> Json:
        return {
            "tokens": [self._names[each.token] for each in tokens],
            "token_logprobs": [
                None if each.logprobs is None else _finite(each.logprobs.logprob) for each in tokens
            ],
            "top_logprobs": [self._top(each) for each in tokens],
            "text_offset": [each.offset for each in tokens],
        }

    def _top(self, token: Token) -> dict[str, float] | None:
        if token.logprobs is None or not self._request.logprobs:
            return None
        top: dict[str, float] = {}
        for each, logprob in token.logprobs.top:
            name = self._names[each]
            # Of several tokens with the same text the likeliest has the name.
            if name in top:
                name = f"token_id:{each}"
            top[name] = _finite(logprob)
        return top


class ChatForm(Form):
    """The form of ``/v1/chat/completions``."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    piece = "chat.completion.chunk"

    def beginning(self, index: int) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [self._chunk([_chat_choice(index, "delta", delta, None, None)])]

    def _whole_choice(self, index: int, answer: Part) -> Json:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        logprobs = self._logprobs(answer.tokens)
        return _chat_choice(index, "message", message, logprobs, answer.finish)

    def _part_choice(self, index: int, part: Part) -> Json:
        delta = {"content": part.text} if part.text else {}
        logprobs = self._logprobs(part.tokens) if part.tokens else None
        return _chat_choice(index, "delta", delta, logprobs, part.finish)

    def _logprobs(self, tokens: Sequence[Token]) -> Json | None:
        if self._request.logprobs is None:
            return None
        content = []
        for each in tokens:
            assert each.logprobs is not None
            top = [self._entry(token, logprob) for token, logprob in each.logprobs.top]
            entry = self._entry(each.token, each.logprobs.logprob)
            content.append({**entry, "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        name = self._names[token]
        known = None if name == f"token_id:{token}" else list(name.encode())
        return {"token": name, "logprob": _finite(logprob), "bytes": known}


def make_form(request: Request, model: str, names: TokenNames) -> Form:
    """Return the form of the answers to a request."""
    if request.kind == "chat":
        return ChatForm(request, model, names)
    return CompletionForm(request, model, names)


def _chat_choice(
    index: int, name: str, value: Json, logprobs: Json | None, finish: Finish | None
) -> Json:
    return {"index": index, name: value, "logprobs": logprobs, "finish_reason": finish}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)
