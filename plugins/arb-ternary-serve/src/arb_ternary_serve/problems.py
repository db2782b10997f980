"""Errors that a client sees, in the form of the OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from starlette.responses import JSONResponse, Response

from arb_ternary.errors import ArbError

#: The word for programs of statuses that have one of their own.
_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


class RequestProblem(Exception):
    """A request that is not answered.

    Args:
        message: one or two sentences: what is wrong, and what fixes it.
        status: the HTTP status.
        param: the field of the body that is wrong.
        code: a word for programs.
        headers: headers of the response.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers

    @classmethod
    def from_error(cls, error: ArbError) -> RequestProblem:
        """Return the problem of a request that asks for what a library refuses."""
        return cls(" ".join([error.what, *error.hint.splitlines()]))

    def body(self) -> dict[str, Any]:
        """Return the body of the response."""
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, usual),
                "param": self.param,
                "code": self.code,
            }
        }


def engine_failed() -> RequestProblem:
    """Return the problem of requests whose model has raised an exception."""
    return RequestProblem(
        "the model failed while it computed this answer; the server's log says why. Try again.",
        status=500,
        code="model_failed",
    )


def timed_out(seconds: float) -> RequestProblem:
    """Return the problem of a request whose answer has taken too long."""
    return RequestProblem(
        f"the answer was not complete after {seconds:g} seconds, the longest time of a request. "
        f"Ask for fewer tokens, or try when the server has less to do.",
        status=504,
        code="timeout",
    )


def problem_response(problem: RequestProblem) -> Response:
    """Return the response that tells a client of a problem."""
    return JSONResponse(problem.body(), problem.status, problem.headers)
