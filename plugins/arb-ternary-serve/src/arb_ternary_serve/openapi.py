"""The description of the API for programs, in the form of OpenAPI."""

from __future__ import annotations

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


def description() -> dict[str, Any]:
    """Return the description."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "arb serve", "version": __version__},
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
        "paths": {
            "/v1/completions": {"post": _post("Continue texts.", BODIES["completion"])},
            "/v1/chat/completions": {"post": _post("Answer a conversation.", BODIES["chat"])},
            "/v1/models": {"get": _operation("List the models.")},
            "/v1/models/{name}": {
                "get": _operation("Show a model."),
                "parameters": [
                    {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
                ],
            },
            "/health": {"get": _operation("Say whether the server answers.")},
            "/metrics": {"get": _operation("Count requests and tokens.")},
        },
    }


def _operation(summary: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "summary": summary,
        "responses": {
            "200": {"description": "The answer."},
            "default": {"description": "What is wrong.", "content": content},
        },
    }


def _post(summary: str, body: Schema) -> dict[str, Any]:
    content = {"application/json": {"schema": body}}
    return {**_operation(summary), "requestBody": {"required": True, "content": content}}
