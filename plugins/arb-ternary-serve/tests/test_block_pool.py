"""Blocks and their users, against plain lists of what each block holds."""

from __future__ import annotations

from attrs import define, field
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary_serve.block_pool import BEGINNING, BlockPool

SIZE = 2
COUNT = 6


@define
class Held:
    """A sequence that has blocks: the ids that they are for, and how many were made known."""

    ids: list[int]
    blocks: list[int]
    learnt: int = 0
    serial: int = BEGINNING


@define
class Restated:
    """What the pool should know: the beginning of a text that each block holds."""

    pool: BlockPool = field(factory=lambda: BlockPool(COUNT, SIZE))
    sequences: list[Held] = field(factory=list)
    contents: dict[int, tuple[int, ...]] = field(factory=dict)

    def begin(self, ids: list[int]) -> None:
        found, serial = self.pool.find(ids)
        for number, block in enumerate(found):
            assert self.contents[block] == tuple(ids[: (number + 1) * SIZE])
        self.pool.share(found)
        missing = -(-len(ids) // SIZE) - len(found)
        if missing > self.pool.available:
            self.pool.release(found)
            return
        taken = self.pool.take(missing)
        for block in taken:
            self.contents.pop(block, None)
        self.sequences.append(Held(ids, found + taken, len(found), serial))

    def learn(self, held: Held) -> None:
        if (held.learnt + 1) * SIZE > len(held.ids):
            return
        block = held.blocks[held.learnt]
        ids = held.ids[held.learnt * SIZE : (held.learnt + 1) * SIZE]
        held.serial = self.pool.learn(block, ids, held.serial)
        held.learnt += 1
        self.contents[block] = tuple(held.ids[: held.learnt * SIZE])

    def check(self) -> None:
        used = {block for held in self.sequences for block in held.blocks}
        assert self.pool.available == COUNT - len(used)
        own = [block for held in self.sequences for block in held.blocks[held.learnt :]]
        assert len(own) == len(set(own))  # nobody else writes to a block that is not full


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), min_size=1, max_size=8))))
def test_blocks_hold_what_they_are_found_by(
    actions: list[tuple[int, list[int]]],
) -> None:
    restated = Restated()
    for kind, numbers in actions:
        if kind == 0:
            restated.begin(numbers)
        elif restated.sequences:
            held = restated.sequences[len(numbers) % len(restated.sequences)]
            if kind == 1:
                restated.learn(held)
            else:
                restated.sequences.remove(held)
                restated.pool.release(held.blocks)
        restated.check()
    for held in restated.sequences:
        restated.pool.release(held.blocks)
    assert restated.pool.available == COUNT
    assert len(set(restated.pool.take(COUNT))) == COUNT


def test_a_beginning_is_found_after_its_sequence_has_ended() -> None:
    pool = BlockPool(3, 2)
    blocks = pool.take(2)
    serial = pool.learn(blocks[0], [1, 2], BEGINNING)
    serial = pool.learn(blocks[1], [3, 4], serial)
    pool.release(blocks)
    assert pool.find([1, 2, 3, 4, 5]) == (blocks, serial)
    assert pool.find([1, 2, 3]) == (blocks[:1], pool.find([1, 2])[1])
    assert pool.find([3, 4]) == ([], BEGINNING)


def test_the_end_of_a_text_is_forgotten_before_its_beginning() -> None:
    pool = BlockPool(2, 1)
    blocks = pool.take(2)
    pool.learn(blocks[1], [8], pool.learn(blocks[0], [7], BEGINNING))
    pool.release(blocks)
    assert pool.take(1) == [blocks[1]]
    assert pool.find([7, 8])[0] == [blocks[0]]
