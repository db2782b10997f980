"""Tokens of many sequences in one native call, beside one sequence that is decoded token by token.

What a token gives has to be the same to the last bit, so nothing here has a tolerance.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from attrs import define, field, frozen
from torch import Tensor

from arb_ternary.backends.select import use_backend
from arb_ternary_cpu.backend import build
from arb_ternary_cpu.isa import usable_isas
from arb_ternary_text.models import native_decode, row_decode
from arb_ternary_text.models.cache import CacheNumbers
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.generate import generate
from arb_ternary_text.models.row_decode import RowDecoder, row_decoder

# For each instruction set.
pytestmark = pytest.mark.sampled("isa")

VOCABULARY = 45
SIZE = 8  # positions of a block
#: Heads with features that are no multiple of 16, shared keys, a window whose first position is in
#: the middle of a block, groups of exponents, a float head, factors of rows.
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"kv_heads": 2, "activation": "swiglu", "head_dim": 24, "rotary_scaling": 2.0},
    {"sliding_window": 11, "tie_embeddings": True, "group_size": 32, "head_dim": 6},
    {"float_parts": ("embedding", "head", "norms"), "query_key_norm": True, "kv_heads": 1},
    {"row_scales": True, "feed_forward": 150, "residual_scale": -1, "logit_scale": 1},
)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(params=usable_isas())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Decode by the kernels of an instruction set."""
    backend = build(request.param)
    for module in (native_decode, row_decode):
        monkeypatch.setattr(module, "get_backend", lambda _: backend)
    return str(request.param)


def decoder(dtype: torch.dtype = torch.float32, **options: Any) -> Decoder:
    torch.manual_seed(len(options))
    base: dict[str, Any] = {"width": 64, "layers": 2, "heads": 4, "max_length": 200}
    with use_backend("cpu"):
        model = Decoder(DecoderConfig(**(base | options)), VOCABULARY)
    if dtype is not torch.float32:
        model.set_dtype(dtype)
    return model.eval()


def one_by_one(model: Decoder, ids: Sequence[int], numbers: CacheNumbers) -> Tensor:
    """Return the logits ``[S, V]`` after each id of a sequence that is alone."""
    cache = model.new_cache(1, numbers)
    return torch.cat([model(torch.tensor([[token]]), cache)[0] for token in ids])


@frozen
class Text:
    """A sequence, and the logits after each of its ids so far."""

    ids: list[int]
    logits: list[Tensor] = field(factory=list)


@define
class Together:
    """Decodes texts in pieces of random sizes and order, in blocks that lie anywhere."""

    rows: RowDecoder
    numbers: CacheNumbers
    texts: list[Text]
    rng: random.Random

    def run(self, most: int) -> None:
        """Read all texts, at most ``most`` ids of each in a call."""
        needed = [-(-len(text.ids) // SIZE) for text in self.texts]
        places = list(range(sum(needed) + 3))
        self.rng.shuffle(places)
        tables = torch.zeros(len(self.texts), max(needed), dtype=torch.int64)
        for number, count in enumerate(needed):
            tables[number, :count] = torch.tensor([places.pop() for _ in range(count)])
        blocks = self.rows.new_blocks(sum(needed) + 3, SIZE, self.numbers)
        for each in blocks:  # what was never written must not matter
            each.fill_(100 if each.dtype is torch.int8 else float("nan"))
        while unread := [n for n, t in enumerate(self.texts) if len(t.logits) < len(t.ids)]:
            turn = self.rng.sample(unread, self.rng.randint(1, len(unread)))
            self._call(turn, most, blocks, tables)

    def _call(self, turn: list[int], most: int, blocks: list[Tensor], tables: Tensor) -> None:
        rows: list[tuple[int, int]] = []
        for number in turn:
            start = len(self.texts[number].logits)
            left = len(self.texts[number].ids) - start
            rows += [(number, start + i) for i in range(min(left, self.rng.randint(1, most)))]
        sequence, position = (torch.tensor(each) for each in zip(*rows, strict=True))
        ids = torch.tensor([self.texts[number].ids[at] for number, at in rows])
        out = self.rows.decode(ids, blocks, tables, sequence, position, torch.arange(len(rows)))
        for (number, _), logits in zip(rows, out, strict=True):
            self.texts[number].logits.append(logits)


def texts(rng: random.Random, lengths: Sequence[int]) -> list[Text]:
    return [Text([rng.randrange(VOCABULARY) for _ in range(length)]) for length in lengths]


def check(model: Decoder, numbers: CacheNumbers, seed: int, lengths: Sequence[int]) -> None:
    rng = random.Random(seed)
    rows = row_decoder(model)
    assert rows is not None
    for most in (1, 3, 40):  # rows that are decoded for each, and panels of many
        together = Together(rows, numbers, texts(rng, lengths), rng)
        together.run(most)
        for text in together.texts:
            expected = one_by_one(model, text.ids, numbers)
            assert torch.equal(torch.stack(text.logits), expected)


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: "-".join(options) or "default")
@pytest.mark.parametrize("numbers", ["float", "bfloat16", "int8"])
def test_rows_give_the_bits_of_one_sequence_alone(
    isa: str, options: dict[str, Any], numbers: CacheNumbers
) -> None:
    check(decoder(**options), numbers, len(isa), (1, 23, 8, 42))


def test_rows_of_a_bfloat16_model(isa: str) -> None:
    check(decoder(torch.bfloat16, kv_heads=2), "float", 1, (5, 30, 17))


@pytest.mark.parametrize("spread", [5, 7, 15])
def test_groups_with_exponents_far_apart(isa: str, spread: int) -> None:
    model = decoder(group_size=32)
    model.blocks[0].feed_forward.down.exponent[3, 1] -= spread
    model.blocks[1].attention.key.exponent[5, 0] -= spread
    check(model, "float", spread, (30, 9))


def test_rows_do_not_depend_on_the_number_of_threads(
    isa: str, threads: Callable[[int], None]
) -> None:
    # large enough for several threads
    model = decoder(width=512, feed_forward=1400, heads=8)
    rows = row_decoder(model)
    assert rows is not None
    ids = torch.arange(50) % VOCABULARY
    tables = torch.tensor([[3, 1, 0, 4], [2, 5, 6, 7]])
    places = torch.arange(50) // 25, torch.arange(50) % 25
    wanted = torch.tensor([0, 24, 30, 49])
    results = []
    for count in (1, 2, 3, 5):
        threads(count)
        results.append(rows.decode(ids, rows.new_blocks(8, 8, "float"), tables, *places, wanted))
    assert all(torch.equal(results[0], other) for other in results)


def test_sequences_share_the_blocks_of_their_beginning(isa: str) -> None:
    model = decoder()
    rows = row_decoder(model)
    assert rows is not None
    beginning = list(range(16))
    blocks = rows.new_blocks(4, SIZE, "float")
    tables = torch.tensor([[3, 0, 1], [3, 0, 2]])

    def read(sequence: int, start: int, ids: list[int]) -> Tensor:
        count = len(ids)
        positions = torch.arange(start, start + count)
        last = torch.tensor([count - 1])
        of = torch.full((count,), sequence)
        return rows.decode(torch.tensor(ids), blocks, tables, of, positions, last)

    first = read(0, 0, [*beginning, 20, 21])
    second = read(1, 16, [30, 31])
    assert torch.equal(first, one_by_one(model, [*beginning, 20, 21], "float")[-1:])
    assert torch.equal(second, one_by_one(model, [*beginning, 30, 31], "float")[-1:])


@pytest.mark.parametrize("numbers", ["float", "bfloat16", "int8"])
@pytest.mark.parametrize("options", VARIANTS[:4], ids=lambda each: "-".join(each) or "default")
def test_a_prompt_gives_the_bits_of_its_tokens_one_by_one(
    isa: str, options: dict[str, Any], numbers: CacheNumbers
) -> None:
    model = decoder(**options)
    ids = torch.randint(0, VOCABULARY, (2, 70), generator=torch.Generator().manual_seed(1))
    cache = model.new_cache(2, numbers)
    model.next_logits(ids[:, :17], cache)
    together = model.next_logits(ids[:, 17:], cache)
    # Only a product of floats may depend on the rows beside it.
    if model.config.float_parts:
        assert torch.allclose(together[0], one_by_one(model, ids[0].tolist(), numbers)[-1])
        cache = model.new_cache(1, numbers)
        together = model.next_logits(ids[:1], cache)
    for row, text in zip(together, ids.tolist(), strict=False):
        assert torch.equal(row, one_by_one(model, text, numbers)[-1])


def test_a_long_prompt_is_read_in_several_calls(isa: str) -> None:
    model = decoder(max_length=600)
    ids = [each % VOCABULARY for each in range(520)]
    prompt = list(generate(model, ids, max_new_tokens=3, temperature=0))
    cache = model.new_cache(1)
    for token in ids:
        logits = model(torch.tensor([[token]]), cache)
    assert prompt[0] == int(logits[0, -1].argmax())


Broken = dict[str, Tensor]


@pytest.mark.parametrize(
    "broken",
    [
        {"ids": torch.tensor([1, VOCABULARY])},
        {"ids": torch.tensor([1, -1])},
        {"sequence": torch.tensor([0, 2])},
        {"slot": torch.tensor([0, 16])},
        {"past": torch.tensor([0, 2])},
        {"past": torch.tensor([0, -1])},
        {"tables": torch.tensor([[0, 1], [4, 2]])},
        {"wanted": torch.tensor([2])},
    ],
    ids=lambda broken: next(iter(broken)),
)
def test_rows_that_name_what_is_not_there_are_refused(isa: str, broken: Broken) -> None:
    plan, _ = native_decode.plan_of(decoder())
    step: Any = build(isa).kernels["text.decode_rows"]
    call: dict[str, Tensor] = {
        "ids": torch.tensor([1, 2]),
        "tables": torch.tensor([[0, 1], [3, 2]]),
        "sequence": torch.tensor([0, 1]),
        "slot": torch.tensor([0, 1]),
        "past": torch.tensor([0, 1]),
        "position": torch.zeros(2, dtype=torch.float64),
        "wanted": torch.tensor([1]),
    }
    blocks = [torch.zeros(4, 4, 8, 16) for _ in range(4)]

    def run(given: dict[str, Tensor]) -> Any:
        ids, *rest = given.values()
        return step(plan)(ids, blocks, *rest)

    assert run(call) is not None
    for each in blocks:
        each.zero_()
    assert run(call | broken) is None
    assert not any(each.any() for each in blocks)
