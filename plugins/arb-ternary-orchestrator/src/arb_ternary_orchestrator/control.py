"""Requests to switch the strategy of a running process: ``orchestrator_control.json`` in the run's
directory.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Final

from attrs import asdict, frozen

from arb_ternary.config.fields import to_plain
from arb_ternary.errors import UsageProblem, nearest
from arb_ternary_orchestrator.report import orchestrators_in
from arb_ternary_orchestrator.strategies.lookup import find_strategy, strategies_named
from arb_ternary_train.directory import RunDirectory, check_regular, write_json
from arb_ternary_train.loading import load_config

CONTROL_FILE: Final = "orchestrator_control.json"


@frozen
class SwitchRequest:
    """A request for the strategy ``name``; ``id`` distinguishes requests of the same name."""

    id: str
    name: str


@frozen
class ControlFile:
    """The control file of the run in ``directory``. A newer request replaces a waiting one."""

    directory: Path

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.directory / CONTROL_FILE

    def write(self, name: str) -> SwitchRequest:
        """Request the strategy ``name``."""
        request = SwitchRequest(uuid.uuid4().hex, name)
        write_json(self.path, asdict(request))
        return request

    def read(self) -> SwitchRequest | None:
        """Return the waiting request; None if there is none.

        Raises:
            ValueError: the file was no request, and has been removed.
            ArbError: something else than a file is there.
        """
        check_regular(self.path)
        try:
            content = json.loads(self.path.read_bytes())
            request = SwitchRequest(content["id"], content["name"])
            if not (isinstance(request.id, str) and isinstance(request.name, str)):
                raise TypeError("id and name are texts")
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self.path.unlink(missing_ok=True)
            raise ValueError(
                f"{self.path}: not a request to switch ({error}); removed. Write one with: arb "
                f"orchestrator switch {self.directory} NAME"
            ) from error
        return request

    def remove(self, request: SwitchRequest) -> None:
        """Remove ``request``, which has been handled, unless a newer one has replaced it."""
        try:
            waiting = self.read()
        except ValueError:
            return  # it has been removed
        if waiting == request:
            self.path.unlink(missing_ok=True)


def request_switch(run: RunDirectory, name: str) -> list[str]:
    """Leave a request for the strategy ``name`` in a run's directory.

    Returns:
        Lines for the user.

    Raises:
        UsageProblem: the run has no orchestrator, has ended, or does not choose among strategies of
            this name.
    """
    # This also loads the config's own plugin files, which may have strategies.
    config = to_plain(load_config(run.config_file).config, given=False)
    orchestrators = orchestrators_in(run, config)
    if run.result_file.exists():
        raise UsageProblem(
            f"{run.path}: the run has ended; there is nothing left to switch",
            f"What was decided in it: arb orchestrator explain {run.path}",
        )
    find_strategy(name)
    allowed: set[str] = set()
    for each in orchestrators:
        named = each["initial_strategy"], each["safety_strategy"], each["strategies"]
        allowed.update(strategies_named(*named))
    if name not in allowed:
        close = nearest(name, allowed)
        hint = f"did you mean {close!r}?\n" if close else ""
        raise UsageProblem(
            f"{run.path}: the run does not choose among strategies of the name {name!r}",
            f"{hint}its strategies: {', '.join(sorted(allowed))}",
        )

    control = ControlFile(run.path)
    try:
        waiting = control.read()
    except ValueError:
        waiting = None
    control.write(name)
    lines = [f"{run.path}: asked for the strategy {name}"]
    if waiting is not None:
        lines.append(f"It replaces an earlier request, for {waiting.name}, that was not taken yet.")
    lines += [
        "A process that trains there takes it between two steps, after the hysteresis since its "
        "last decision.",
        "If none does, the next process takes it that continues the run with --resume.",
    ]
    return lines
