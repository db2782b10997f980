"""Continue many sequences together, a token of each per step.

A step reads one id of every sequence that is being continued, and some of those whose prompts are
being read: prompts take turns, ``chunk`` positions per step, so that a long one delays nobody by
more than a chunk. Sequences enter and leave between steps.

Keys and values lie in blocks. A sequence enters if there is a seat and blocks for its prompt and
all tokens that it may draw; until then it waits, in order of arrival, and those behind it wait too.
So a sequence that has entered is never put off. A prompt that begins as an earlier sequence did
uses its blocks and skips those positions. If the earlier one is just reading them, it waits for
that, and lets others pass.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.errors import UsageProblem
from arb_ternary_serve.block_pool import BEGINNING, BlockPool
from arb_ternary_serve.runners import Piece, make_runner
from arb_ternary_serve.sequence import Event, Finish, Options, SequenceState
from arb_ternary_text.models.cache import CacheNumbers
from arb_ternary_text.models.generate import CachedModel, cache_format, check_ids


@frozen
class Load:
    """The present work of an engine, and counts of its past.

    Attributes:
        waiting: sequences that have not entered.
        running: sequences that have.
        blocks: blocks of keys and values in all.
        free_blocks: blocks that no sequence uses.
        read: ids of prompts that were read.
        reused: ids of prompts whose keys and values were found.
        drawn: tokens that were drawn.
    """

    waiting: int
    running: int
    blocks: int
    free_blocks: int
    read: int
    reused: int
    drawn: int


class Engine:
    """Continues sequences of ids with one model, which must not change meanwhile.

    On the CPU a plain decoder with ternary weights runs by the kernel ``text.decode_rows`` of its
    backend: all sequences together, with the same logits, to the last bit, as if each were alone
    and read one id at a time. Other models run their modules for one sequence after another.

    An engine belongs to one thread. After an exception from :meth:`step` make a new one.

    Args:
        model: a causal model, in evaluation mode.
        max_sequences: largest number of sequences that run together.
        cache_bytes: memory for keys and values.
        chunk: largest number of positions of prompts that a step reads.
        cache: format of keys and values: ``bfloat16``, ``float``, the dtype of the model, or
            ``int8``. None: bfloat16 if the model can keep them so, or else float.
        device: the device of the model.

    Raises:
        UsageProblem: a limit is out of range, or the model cannot make such a cache.
    """

    def __init__(
        self,
        model: CachedModel,
        *,
        max_sequences: int = 16,
        cache_bytes: int,
        chunk: int = 256,
        cache: CacheNumbers | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (("max_sequences", max_sequences), ("chunk", chunk)):
            if value < 1:
                raise UsageProblem(f"{name}: must be at least 1, not {value}")
        self._model = model
        self._chunk = chunk
        with torch.no_grad():
            numbers = cache_format(model, cache)
            self._runner = make_runner(model, torch.device(device), numbers, chunk)
        size = self._runner.block_size
        blocks = cache_bytes // self._runner.block_bytes
        if blocks < 1:
            raise UsageProblem(
                f"cache_bytes: {cache_bytes} bytes hold no block of {size} positions, which takes "
                f"{self._runner.block_bytes}"
            )
        self._runner.allocate(max_sequences, blocks)
        self._pool = BlockPool(blocks, size)
        self._free_seats = list(range(max_sequences))[::-1]
        self._waiting: deque[SequenceState] = deque()
        self._running: dict[int, SequenceState] = {}
        self._readers: deque[SequenceState] = deque()  # in the order of their turns
        self._last_handle = 0
        self._read = 0
        self._reused = 0
        self._drawn = 0

    @property
    def shares_while_running(self) -> bool:
        """Whether a sequence can use what another one has read that still runs.

        If not, it can use what the last one that ended has read: sequences with the same beginning
        are best submitted one after another.
        """
        return self._runner.shares_blocks

    @property
    def cache_bytes(self) -> int:
        """Bytes of all blocks of keys and values."""
        return self._pool.count * self._runner.block_bytes

    @property
    def load(self) -> Load:
        """The present work of the engine."""
        return Load(
            waiting=len(self._waiting),
            running=len(self._running),
            blocks=self._pool.count,
            free_blocks=self._pool.available,
            read=self._read,
            reused=self._reused,
            drawn=self._drawn,
        )

    def submit(self, ids: Iterable[int], options: Options) -> int:
        """Add a sequence to those that wait; return its handle.

        Args:
            ids: the prompt, at least one id.
            options: how it is continued.

        Raises:
            UsageProblem: an option or an id is out of range, or the sequence would not fit into
                the context or the cache even if it were alone.
        """
        prompt = list(ids)
        self.check(prompt, options)
        self._last_handle += 1
        self._waiting.append(SequenceState(self._last_handle, prompt, options, len(prompt)))
        return self._last_handle

    def check(self, prompt: Sequence[int], options: Options) -> None:
        """Refuse what :meth:`submit` refuses. Any thread may ask.

        Raises:
            UsageProblem: as :meth:`submit` does.
        """
        options.check()
        check_ids(prompt, options.stop, self._model.vocabulary_size)
        wanted = options.max_new_tokens
        context = self._model.max_length
        # The last token that is drawn is not read.
        room = context - len(prompt) + 1
        if self._model.sliding_window is None and wanted > room:
            raise UsageProblem(
                f"the prompt has {len(prompt)} tokens, and the context {context}: there is room "
                f"for {max(0, room)} new ones, not for {wanted}",
                "Shorten the prompt, or ask for fewer tokens.",
            )
        needed = self._blocks_for(len(prompt) + wanted)
        if needed > self._pool.count:
            raise UsageProblem(
                f"the prompt of {len(prompt)} tokens and {wanted} new ones need {needed} blocks of "
                f"keys and values, and there are {self._pool.count}",
                "Ask for fewer tokens, or give the engine a larger cache.",
            )

    def room(self, prompt_length: int, wanted: int) -> int:
        """Return how many of ``wanted`` tokens fit after a prompt. Any thread may ask."""
        if self._model.sliding_window is None:
            wanted = min(wanted, self._model.max_length - prompt_length + 1)
        # The number of blocks does not fall as a sequence grows.
        return bisect_right(
            range(1, max(0, wanted) + 1),
            self._pool.count,
            key=lambda new: self._blocks_for(prompt_length + new),
        )

    def cancel(self, handle: int) -> None:
        """End a sequence, if it has not ended: there are no more events of it."""
        running = self._running.get(handle)
        if running is not None:
            self._retire(running)
        for waiting in list(self._waiting):
            if waiting.handle == handle:
                self._waiting.remove(waiting)

    @torch.no_grad()
    def step(self) -> list[Event]:
        """Read one piece of each sequence whose turn it is, and draw the tokens that follow.

        Returns:
            What happened to the sequences; nothing if there are none, or if prompts were read only.
        """
        self._admit()
        turns = self._turns()
        if not turns:
            return []
        pieces = [self._piece(sequence, count) for sequence, count in turns]
        results = self._runner.run(pieces)
        events = []
        for (sequence, count), logits_WV in zip(turns, results, strict=True):
            self._advance(sequence, count, logits_WV)
            if sequence.unread:
                self._readers.append(sequence)
                continue
            event = self._draw(sequence, logits_WV)
            events.append(event)
            if event.finished is not None:
                self._retire(sequence)
        return events

    def _blocks_for(self, length: int) -> int:
        # The last token that is drawn is not read.
        return -(-self._runner.positions(max(1, length - 1)) // self._pool.size)

    def _admit(self) -> None:
        """Let sequences enter in order of arrival while there is a seat and memory."""
        passed: list[SequenceState] = []
        while self._waiting and self._free_seats:
            sequence = self._waiting.popleft()
            found, serial = self._known_beginning(sequence)
            if self._is_being_read(sequence, len(found), serial):
                passed.append(sequence)
                continue
            self._pool.share(found)
            length = len(sequence.ids) + sequence.options.max_new_tokens
            missing = self._blocks_for(length) - len(found)
            if missing > self._pool.available:
                self._pool.release(found)
                self._waiting.appendleft(sequence)
                break
            sequence.blocks = found + self._pool.take(missing)
            sequence.learnt = len(found)
            sequence.serial = serial
            sequence.seat = self._free_seats.pop()
            beginning = sequence.ids[: sequence.reusable]
            held = self._runner.begin(sequence.seat, sequence.blocks, beginning)
            sequence.read = max(held, len(found) * self._pool.size)
            self._running[sequence.handle] = sequence
            self._readers.append(sequence)
            self._reused += sequence.read
        self._waiting.extendleft(reversed(passed))

    def _known_beginning(self, sequence: SequenceState) -> tuple[list[int], int]:
        """Return known blocks of the beginning of a prompt, and the serial of the last."""
        if not self._runner.shares_blocks:
            return [], BEGINNING
        return self._pool.find(sequence.ids[: sequence.reusable])

    def _is_being_read(self, sequence: SequenceState, known: int, serial: int) -> bool:
        """Return whether a sequence just reads the block that is next to the known ones."""
        first = known * self._pool.size
        stop = first + self._pool.size
        if not self._runner.shares_blocks or stop > sequence.reusable:
            return False
        block = sequence.ids[first:stop]
        return any(
            reader.learnt == known and reader.serial == serial and reader.ids[first:stop] == block
            for reader in self._readers
        )

    def _turns(self) -> list[tuple[SequenceState, int]]:
        """Return the sequences of this step, and how many ids of each are read."""
        reading = {sequence.handle for sequence in self._readers}
        turns = [(each, 1) for each in self._running.values() if each.handle not in reading]
        left = self._chunk
        while self._readers:
            # Pieces are always whole chunks, but for the last: a prompt is cut in the same places
            # whoever reads beside it.
            count = min(self._chunk, self._readers[0].unread)
            if count > left:
                break
            left -= count
            turns.append((self._readers.popleft(), count))
        return turns

    def _piece(self, sequence: SequenceState, count: int) -> Piece:
        start = sequence.read
        stop = start + count
        wanted = 0
        if count == sequence.unread and sequence.options.max_new_tokens:
            wanted = 1
        reported_from = sequence.options.prompt_logprobs_from
        if reported_from is not None and start < sequence.prompt_length:
            # The token at a position is predicted at the one before it.
            first = max(start, reported_from - 1)
            wanted = max(wanted, stop - first)
        return Piece(sequence.seat, start, sequence.ids[start:stop], wanted)

    def _advance(self, sequence: SequenceState, count: int, logits_WV: Tensor) -> None:
        """Count ids as read, and make known the blocks that are full now."""
        if sequence.read < sequence.prompt_length:
            self._read += count
            if sequence.options.prompt_logprobs_from is not None:
                self._report_prompt(sequence, sequence.read + count, logits_WV)
        sequence.read += count
        if not self._runner.shares_blocks:
            return
        size = self._pool.size
        for number in range(sequence.learnt, sequence.read // size):
            ids = sequence.ids[number * size : (number + 1) * size]
            block = sequence.blocks[number]
            sequence.serial = self._pool.learn(block, ids, sequence.serial)
            sequence.learnt = number + 1

    def _report_prompt(self, sequence: SequenceState, stop: int, logits_WV: Tensor) -> None:
        """Report the tokens of the prompt behind the last positions before ``stop``."""
        following: Sequence[int] = sequence.ids[stop - logits_WV.size(0) + 1 :]
        for token, logits_V in zip(following, logits_WV, strict=False):
            reported = sequence.logprobs_of(token, logits_V)
            assert reported is not None
            sequence.prompt_logprobs.append(reported)

    def _draw(self, sequence: SequenceState, logits_WV: Tensor) -> Event:
        drawn = len(sequence.ids) - sequence.prompt_length
        prompt_logprobs = None
        if drawn == 0 and sequence.options.prompt_logprobs_from is not None:
            prompt_logprobs = tuple(sequence.prompt_logprobs)
        token = None
        logprobs = None
        finished: Finish | None = "length"
        if sequence.options.max_new_tokens > 0:
            token = sequence.draw(logits_WV[-1])
            logprobs = sequence.logprobs_of(token, logits_WV[-1])
            if token in sequence.options.stop:
                token = None
                finished = "stop"
            else:
                sequence.ids.append(token)
                self._drawn += 1
                if drawn + 1 < sequence.options.max_new_tokens:
                    finished = None
        return Event(sequence.handle, token, finished, logprobs, prompt_logprobs)

    def _retire(self, sequence: SequenceState) -> None:
        del self._running[sequence.handle]
        if sequence in self._readers:
            self._readers.remove(sequence)
        self._runner.end(sequence.seat)
        self._free_seats.append(sequence.seat)
        self._pool.release(sequence.blocks)
