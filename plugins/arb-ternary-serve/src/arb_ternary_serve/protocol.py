"""The requests of the OpenAI API: which fields they have, and what they ask for.

The tables here are what a body is checked against, and what ``/openapi.json`` shows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from attrs import frozen

from arb_ternary_serve.problems import RequestProblem
from arb_ternary_serve.schema import Schema, check

#: Which endpoint a request came to.
Kind = Literal["completion", "chat"]

#: Largest number of prompts times answers to each.
MAX_CHOICES: Final = 128
#: Largest number of stop strings, and of likeliest tokens that are reported.
MAX_STOPS: Final = 4
MAX_TOP: Final = 20
#: Tokens of a completion that says no number, as in the OpenAI API.
COMPLETION_TOKENS: Final = 16
#: Temperature of a request that says none, as of `arb chat` and `arb generate`.
TEMPERATURE: Final = 0.8

_FLAG: Final[Schema] = {"type": ["boolean", "null"]}
_COUNT: Final[Schema] = {"type": ["integer", "null"], "minimum": 0}
_IDS: Final[Schema] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_STRING: Final[Schema] = {"type": "string"}
_STOP: Final[Schema] = {"type": "string", "minLength": 1}

_COMMON: Final[Mapping[str, Schema]] = {
    "model": {"type": ["string", "null"], "description": "Id of a model; default: the first one."},
    "max_tokens": _COUNT,
    "temperature": {
        "type": ["number", "null"],
        "minimum": 0,
        "maximum": 100,
        "description": f"0 takes the most likely token; default: {TEMPERATURE}.",
    },
    "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": ["integer", "null"], "minimum": 1},
    "seed": {"type": ["integer", "null"], "minimum": 0, "maximum": 2**63 - 1},
    "n": {"type": ["integer", "null"], "minimum": 1, "maximum": MAX_CHOICES},
    "stop": {
        "anyOf": [
            {"type": "null"},
            _STOP,
            {"type": "array", "items": _STOP, "maxItems": MAX_STOPS},
        ],
        "description": f"a text or a list of at most {MAX_STOPS}, none of them empty",
    },
    "stream": _FLAG,
    "stream_options": {
        "type": ["object", "null"],
        "properties": {"include_usage": _FLAG, "include_obfuscation": _FLAG},
        "additionalProperties": False,
    },
}

#: Fields that have no effect, whatever their value.
IGNORED: Final = (
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)

#: Fields of the OpenAI API that are not supported, and the values at which they would change
#: nothing; null is always one of them.
_UNSUPPORTED: Final[Mapping[str, Sequence[Any]]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
}
_UNSUPPORTED_COMPLETION: Final[Mapping[str, Sequence[Any]]] = {"best_of": (1,), "suffix": ("",)}
_UNSUPPORTED_CHAT: Final[Mapping[str, Sequence[Any]]] = {
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}

_MESSAGE: Final[Schema] = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant"]},
        "content": {
            "anyOf": [
                _STRING,
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "type": {"type": "string", "enum": ["text"]},
                            "text": _STRING,
                        },
                        "required": ["type", "text"],
                        "additionalProperties": False,
                    },
                },
            ],
            "description": 'a text, or a list of {"type": "text", "text": ...}: the model reads '
            "nothing else",
        },
        "name": {"type": ["string", "null"]},
        "reasoning_content": {"type": ["string", "null"]},
        # Clients send these back with an earlier answer.
        "annotations": {"enum": [None, []]},
        "audio": {"type": "null"},
        "function_call": {"type": "null"},
        "refusal": {"type": "null"},
        "tool_calls": {"enum": [None, []]},
    },
    "required": ["role", "content"],
    "additionalProperties": False,
}


def _body(
    fields: Mapping[str, Schema], unsupported: Mapping[str, Sequence[Any]], required: str
) -> Schema:
    neutral = {
        name: {"enum": [None, *values], "description": "Not supported: any other value is refused."}
        for name, values in {**_UNSUPPORTED, **unsupported}.items()
    }
    ignored = {name: {"description": "Has no effect."} for name in IGNORED}
    return {
        "type": "object",
        "properties": {**_COMMON, **fields, **neutral, **ignored},
        "required": [required],
        "additionalProperties": False,
    }


#: Schema of the body of each endpoint.
BODIES: Final[Mapping[Kind, Schema]] = {
    "completion": _body(
        {
            "prompt": {
                "anyOf": [
                    _STRING,
                    _IDS,
                    {"type": "array", "items": _STRING, "minItems": 1, "maxItems": MAX_CHOICES},
                    {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_CHOICES},
                ],
                "description": f"a text, a list of token ids, or a list of at most {MAX_CHOICES} "
                f"of one of them",
            },
            "echo": _FLAG,
            "logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_TOP},
        },
        _UNSUPPORTED_COMPLETION,
        "prompt",
    ),
    "chat": _body(
        {
            "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
            "max_completion_tokens": _COUNT,
            "logprobs": _FLAG,
            "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_TOP},
        },
        _UNSUPPORTED_CHAT,
        "messages",
    ),
}


@frozen
class Request:
    """A checked request of a client.

    Attributes:
        kind: the endpoint.
        model: id of the model; None = the first one.
        prompts: of a completion: texts or ids.
        messages: of a chat: what the template reads.
        max_tokens: largest number of tokens of an answer; None = the default of the endpoint.
        n: number of answers to each prompt.
        temperature: see :class:`~arb_ternary_serve.sequence.Options`, as for the next three.
        top_k: see there.
        top_p: see there.
        seed: that of the first answer; the others count on from it.
        stop: texts that end an answer.
        logprobs: number of likeliest tokens to report; None = report no probabilities.
        echo: whether a completion repeats its prompt.
        stream: whether the answer is sent as it is drawn.
        include_usage: whether a stream ends with the number of tokens.
    """

    kind: Kind
    model: str | None
    prompts: tuple[str | tuple[int, ...], ...]
    messages: tuple[Mapping[str, Any], ...]
    max_tokens: int | None
    n: int
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int | None
    stop: tuple[str, ...]
    logprobs: int | None
    echo: bool
    stream: bool
    include_usage: bool


def parse_request(kind: Kind, content: bytes) -> Request:
    """Read the body of a request.

    Raises:
        RequestProblem: it is no JSON, or a field is unknown, not supported or out of range.
    """
    body = _parse_json(content)
    check(body, BODIES[kind], "")
    given = {name: value for name, value in body.items() if value is not None}
    stop = given.get("stop", ())
    options = given.get("stream_options", {})
    n = given.get("n", 1)
    prompts = _prompts(given["prompt"]) if kind == "completion" else ()
    if n * max(1, len(prompts)) > MAX_CHOICES:
        raise RequestProblem(
            f"n: {len(prompts)} prompts with {n} answers each are more than the {MAX_CHOICES} "
            f"answers that a request may ask for",
            param="n",
        )
    return Request(
        kind=kind,
        model=given.get("model"),
        prompts=prompts,
        messages=tuple(map(_message, given.get("messages", ()))),
        max_tokens=given.get("max_completion_tokens", given.get("max_tokens")),
        n=n,
        temperature=float(given.get("temperature", TEMPERATURE)),
        top_k=given.get("top_k"),
        top_p=given.get("top_p"),
        seed=given.get("seed"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        logprobs=_logprobs(kind, given),
        echo=given.get("echo", False),
        stream=given.get("stream", False),
        include_usage=bool(options.get("include_usage")),
    )


def _parse_json(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content, parse_constant=_refuse_constant)
    except RecursionError:
        raise RequestProblem("the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:  # of both the UTF-8 decoder and the JSON parser
        # The decoder's message would repeat the text.
        reason = getattr(error, "msg", "it is not UTF-8, or has a number that JSON does not know")
        place = getattr(error, "pos", None)
        where = "" if place is None else f" at character {place}"
        what = f"the body is not JSON: {reason}{where}"
        raise RequestProblem(what, code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestProblem("the body must be a JSON object", code="invalid_json")
    return body


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _prompts(prompt: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt[0], int):
        return (tuple(prompt),)
    return tuple(each if isinstance(each, str) else tuple(each) for each in prompt)


def _message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message as templates read it."""
    content = message["content"]
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    role = "system" if message["role"] == "developer" else message["role"]
    read = {"role": role, "content": content}
    for name in ("name", "reasoning_content"):
        if message.get(name) is not None:
            read[name] = message[name]
    return read


def _logprobs(kind: Kind, given: Mapping[str, Any]) -> int | None:
    if kind == "completion":
        count: int | None = given.get("logprobs")
        return count
    if not given.get("logprobs"):
        if given.get("top_logprobs"):
            raise RequestProblem("top_logprobs: needs logprobs: true", param="top_logprobs")
        return None
    return int(given.get("top_logprobs", 0))
