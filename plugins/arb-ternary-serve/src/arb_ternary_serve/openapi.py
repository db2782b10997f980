"""The description of the API for programs, in the form of OpenAPI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from arb_ternary_serve import __version__
from arb_ternary_serve.protocol import BODIES
from arb_ternary_serve.schema import Schema

_ERROR: Final[Schema] = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
_PROBLEMS: Final[Mapping[str, str]] = {
    "400": "The request is wrong.",
    "401": "A key is needed.",
    "403": "The header Host names another machine.",
    "404": "There is no such model.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "Too many answers wait.",
    "500": "The model has failed.",
    "503": "The server is about to stop.",
    "504": "The answer took too long.",
}


def description() -> dict[str, Any]:
    """Return the description."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "arb serve", "version": __version__},
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "paths": {
            "/v1/completions": {"post": _post("Continue texts.", BODIES["completion"])},
            "/v1/chat/completions": {"post": _post("Answer a conversation.", BODIES["chat"])},
            "/v1/models": {"get": _get("List the models.")},
            "/v1/models/{name}": {
                "get": {
                    **_get("Show a model."),
                    "parameters": [
                        {
                            "name": "name",
                            "in": "path",
                            "required": True,
                            "schema": {"type": "string"},
                        }
                    ],
                }
            },
            "/health": {"get": {**_get("Say whether the server answers."), "security": []}},
            "/metrics": {"get": _get("Count requests and tokens.", "text/plain")},
            "/openapi.json": {"get": _get("Describe the API.")},
        },
    }


def _post(summary: str, body: Schema) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "The answer.", "content": content}, **_problems()},
        "security": [{}, {"key": []}],
    }


def _get(summary: str, media_type: str = "application/json") -> dict[str, Any]:
    found = {"description": "It.", "content": {media_type: {}}}
    return {
        "summary": summary,
        "responses": {"200": found, **_problems()},
        "security": [{}, {"key": []}],
    }


def _problems() -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": text, "content": content} for status, text in _PROBLEMS.items()}
