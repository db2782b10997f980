"""A switch that somebody asks a running process for: ``orchestrator_control.json`` in the run's
directory.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Final

from attrs import frozen

from arb_ternary_train.directory import write_json

CONTROL_FILE: Final = "orchestrator_control.json"


@frozen
class SwitchRequest:
    """Somebody wants the strategy ``name``; ``id`` tells one request from another."""

    id: str
    name: str


@frozen
class ControlFile:
    """The control file of the run in ``directory``. A newer request takes the place of one that is
    still waiting.
    """

    directory: Path

    @property
    def path(self) -> Path:
        """Where the request lies."""
        return self.directory / CONTROL_FILE

    def write(self, name: str) -> SwitchRequest:
        """Ask for the strategy ``name``."""
        request = SwitchRequest(uuid.uuid4().hex, name)
        write_json(self.path, {"id": request.id, "name": request.name})
        return request

    def read(self) -> SwitchRequest | None:
        """The request that waits; None where there is none. A file that is no request is removed,
        and named.

        Raises:
            ValueError: it was none, and has been removed.
        """
        try:
            found = self.path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            content = json.loads(found)
            request = SwitchRequest(content["id"], content["name"])
            if not (isinstance(request.id, str) and isinstance(request.name, str)):
                raise TypeError("id and name are texts")
        except (ValueError, KeyError, TypeError) as error:
            self.path.unlink(missing_ok=True)
            raise ValueError(
                f"{self.path}: not a request to switch ({error}); removed. Write one with: arb "
                f"orchestrator switch {self.directory} NAME"
            ) from error
        return request

    def remove(self, request: SwitchRequest) -> None:
        """Remove ``request``, which has been dealt with, unless a newer one has taken its place."""
        try:
            waiting = self.read()
        except ValueError:
            return  # whatever it is, it has been removed
        if waiting == request:
            self.path.unlink(missing_ok=True)
