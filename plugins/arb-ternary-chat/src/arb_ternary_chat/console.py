"""A conversation in a terminal or a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import click

from arb_ternary.cli.output import print_notes
from arb_ternary.errors import ArbError, UsageProblem, nearest
from arb_ternary_chat.session import Session, Speed
from arb_ternary_train.audit import audit


class Console:
    """Reads turns and commands, and prints answers.

    Args:
        session: the conversation.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self._commands: Mapping[str, Callable[[str], None]] = {
            "help": self._help,
            "reset": self._reset,
            "save": self._save,
            "stats": self._stats,
            "system": self._system,
        }

    def run(self) -> None:
        """Read turns until the input ends or ``/exit``."""
        self._greet()
        while (line := self._next_line()) is not None:
            said = line.strip()
            if said == "/exit":
                break
            if not said:
                continue
            try:
                if said.startswith("/"):
                    self._obey(said[1:])
                else:
                    self._answer(said)
            except ArbError as error:
                if not self.interactive:
                    raise
                self._note(f"error: {error.what}")
                if error.hint:
                    self._note(error.hint)

    # --- turns

    def _next_line(self) -> str | None:
        """Return the next line; None at the end of the input."""
        if not self.interactive:
            line = sys.stdin.readline()
            return line or None
        while True:
            try:
                return input("> ")
            except EOFError:
                click.echo()
                return None
            except KeyboardInterrupt:
                click.echo()
                self._note("/exit or Ctrl-D ends the conversation")

    def _answer(self, said: str) -> None:
        dropped = self.session.dropped
        try:
            for piece in self.session.say(said):
                click.echo(piece, nl=False)
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            click.echo(" [stopped]", nl=False)
        click.echo()
        if self.session.dropped > dropped:
            self._note(
                f"the context is full: the model no longer sees the first {self.session.dropped} "
                f"messages"
            )
        if self.interactive:
            click.echo()

    # --- commands

    def _obey(self, written: str) -> None:
        name, _, rest = written.partition(" ")
        command = self._commands.get(name)
        if command is None:
            close = nearest(name, [*self._commands, "exit"])
            meant = f"Did you mean /{close}? " if close else ""
            raise UsageProblem(f"there is no command /{name}", f"{meant}/help lists them.")
        command(rest.strip())

    def _help(self, _rest: str) -> None:
        for command, meaning in (
            ("/system TEXT", "set the system message and begin anew"),
            ("/reset", "forget the conversation"),
            ("/save FILE", "append the conversation to a .jsonl file"),
            ("/stats", "tokens, and tokens per second"),
            ("/exit", "end; Ctrl-D does the same"),
            ("Ctrl-C", "stop the answer"),
        ):
            self._note(f"{command:<13} {meaning}")

    def _reset(self, _rest: str) -> None:
        self.session.reset()
        self._note("a new conversation")

    def _system(self, text: str) -> None:
        if not self.session.has_template:
            raise UsageProblem("this model has no chat template, so it knows no system message")
        self.session.system = text or None
        self.session.reset()
        self._note("a new conversation" + ("" if text else ", without a system message"))

    def _save(self, name: str) -> None:
        if not name:
            raise UsageProblem("/save needs the name of a file")
        session = self.session
        record: dict[str, object] = {"text": session.text}
        if session.has_template:
            record = {"messages": session.conversation()}
        path = Path(name).expanduser()
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except (OSError, ValueError) as error:
            raise UsageProblem(f"{path}: {getattr(error, 'strerror', None) or error}") from error
        self._note(f"{path}: one line added")

    def _stats(self, _rest: str) -> None:
        self._note(f"last answer: {described(self.session.last)}")
        self._note(f"all answers: {described(self.session.speed)}")

    # --- what is shown

    def _greet(self) -> None:
        model = self.session.model
        print_notes(model.notes)
        if not self.session.has_template:
            print_notes(["the model has no chat template: it continues what you write"])
        if self.interactive:
            weights = audit(model.module).parameters
            context = self.session.context
            size = "" if context is None else f", {context:,} tokens of context"
            self._note(f"{model.source}: {weights:,} weights{size}, backend {model.backend}")
            self._note("/help lists commands, Ctrl-D ends")
            click.echo()

    def _note(self, text: str) -> None:
        click.secho(text, dim=True, err=not self.interactive)


def described(speed: Speed) -> str:
    """Return counts and rates as a sentence."""
    text = f"{speed.read} tokens read, {speed.drawn} drawn"
    if speed.tokens_per_second is not None:
        text += f", {speed.tokens_per_second:.1f} tokens per second"
    return text
