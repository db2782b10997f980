"""A thread that runs an engine for requests of the event loop."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from attrs import define

from arb_ternary.errors import UsageProblem
from arb_ternary_chat.model import Model
from arb_ternary_serve.engine import Engine, Load
from arb_ternary_serve.problems import RequestProblem, engine_failed
from arb_ternary_serve.sequence import Event, Options
from arb_ternary_serve.text_stream import TokenNames


@define(eq=False)
class Ticket:
    """A sequence of a request.

    Attributes:
        index: which of the answers of its request it is.
        prompt: the ids that it begins with.
        options: how it is continued.
        events: gets ``(index, event)``, or the problem that has ended the sequence.
        handle: its name in the engine; belongs to the thread.
        ended: whether no more events come.
    """

    index: int
    prompt: Sequence[int]
    options: Options
    events: asyncio.Queue[tuple[int, Event | RequestProblem]]
    handle: int | None = None
    ended: bool = False


class ModelWorker:
    """A model, its engine, and the thread that steps it.

    All methods belong to the thread of the event loop, except those that begin with ``_run``.

    Args:
        name: id of the model.
        model: the model.
        make_engine: makes an engine; called again after one has failed.
        max_waiting: largest number of sequences that wait for those that run.
        max_sequences: largest number of sequences that the engine runs together.
        report: is told of an exception of the engine.

    Attributes:
        token_names: texts of single tokens.
        template_turn: is held while the chat template writes a conversation.
        load: what the engine did, as of its last step.
    """

    def __init__(
        self,
        name: str,
        model: Model,
        make_engine: Callable[[], Engine],
        *,
        max_sequences: int,
        max_waiting: int,
        report: Callable[[str, BaseException], object],
    ) -> None:
        self.name = name
        self.model = model
        self.token_names = TokenNames(model.tokenizer)
        self.template_turn = asyncio.Lock()
        self._make_engine = make_engine
        self._engine: Engine | None = make_engine()
        self._most = max_sequences + max_waiting
        self._report = report
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}  # by handle; belongs to the thread
        self._live = 0
        self._thread = threading.Thread(target=self._run, name=f"engine {name}", daemon=True)
        self.load = self._engine.load

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; events go to ``loop``."""
        self._loop = loop
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """End the thread after its present step, and wait for that."""
        self._commands.put(None)
        self._thread.join(seconds)

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes of the weights, and of the keys and values."""
        module = self.model.module
        tensors = itertools.chain(module.parameters(), module.buffers())
        return sum(each.nbytes for each in tensors), self._working_engine().cache_bytes

    def room(self, prompt_length: int, wanted: int) -> int:
        """Return how many of ``wanted`` tokens fit after a prompt."""
        return self._working_engine().room(prompt_length, wanted)

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Let sequences of a request wait for the engine.

        Raises:
            RequestProblem: one would never fit, too many wait, or the model is out of order.
        """
        engine = self._working_engine()
        try:
            for ticket in tickets:
                engine.check(ticket.prompt, ticket.options)
        except UsageProblem as error:
            raise RequestProblem.from_error(error) from error
        # A request with many prompts may exceed the limit, so that it can be answered at all.
        if self._live >= self._most:
            raise RequestProblem(
                f"{self.name}: {self._live} answers are being drawn or wait already. Try again "
                f"later.",
                status=429,
                code="too_many_requests",
                headers={"Retry-After": "2"},
            )
        self._live += len(tickets)
        for ticket in tickets:
            self._commands.put(partial(self._run_submit, ticket))

    def cancel(self, ticket: Ticket) -> None:
        """End a sequence."""
        if not ticket.ended:
            self._end(ticket)
            self._commands.put(partial(self._run_cancel, ticket))

    def _working_engine(self) -> Engine:
        engine = self._engine
        if engine is None:
            raise RequestProblem(
                f"{self.name}: the model has failed and is not ready again",
                status=503,
                code="model_failed",
                headers={"Retry-After": "10"},
            )
        return engine

    def _end(self, ticket: Ticket) -> None:
        ticket.ended = True
        self._live -= 1

    def _deliver(
        self, outcomes: Sequence[tuple[Ticket, Event | RequestProblem]], load: Load
    ) -> None:
        self.load = load
        for ticket, outcome in outcomes:
            if ticket.ended:
                continue
            if isinstance(outcome, RequestProblem) or outcome.finished is not None:
                self._end(ticket)
            ticket.events.put_nowait((ticket.index, outcome))

    def _run(self) -> None:
        while self._run_commands():
            self._run_step()

    def _run_commands(self) -> bool:
        """Carry out what was asked, and wait if there is nothing else to do; False = the end."""
        while True:
            try:
                command = self._commands.get(block=not self._tickets)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _run_submit(self, ticket: Ticket) -> None:
        if ticket.ended:
            return
        if self._engine is None:
            self._run_deliver([(ticket, engine_failed())])
            return
        try:
            ticket.handle = self._engine.submit(ticket.prompt, ticket.options)
        except Exception as error:  # it was checked: only memory may lack
            self._report(self.name, error)
            self._run_deliver([(ticket, engine_failed())])
            return
        self._tickets[ticket.handle] = ticket

    def _run_cancel(self, ticket: Ticket) -> None:
        handle = ticket.handle
        # After a failure another sequence may have the handle.
        if handle is None or self._tickets.get(handle) is not ticket:
            return
        del self._tickets[handle]
        assert self._engine is not None
        self._engine.cancel(handle)
        self._run_deliver([])

    def _run_step(self) -> None:
        assert self._engine is not None
        try:
            events = self._engine.step()
        except Exception as error:
            self._run_recover(error)
            return
        outcomes: list[tuple[Ticket, Event | RequestProblem]] = []
        for event in events:
            outcomes.append((self._tickets[event.handle], event))
            if event.finished is not None:
                del self._tickets[event.handle]
        self._run_deliver(outcomes)

    def _run_deliver(self, outcomes: Sequence[tuple[Ticket, Event | RequestProblem]]) -> None:
        load = self.load if self._engine is None else self._engine.load
        # The loop may have ended before this thread has.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver, outcomes, load)

    def _run_recover(self, error: Exception) -> None:
        """End all sequences, and make a new engine."""
        self._report(self.name, error)
        error.__traceback__ = None  # it holds the engine, whose memory the next one needs
        failed = list(self._tickets.values())
        self._tickets.clear()
        self._engine = None
        try:
            self._engine = self._make_engine()
        except Exception as second:
            self._report(self.name, second)
        self._run_deliver([(ticket, engine_failed()) for ticket in failed])
