"""The models that the kernel of rows serves, and what it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from arb_ternary.backends.select import use_backend
from arb_ternary.errors import UsageProblem
from arb_ternary_text.models import block_kernels, native_decode, row_decode
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decode_plan import DecoderPlan
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.row_decode import RowDecoder, row_decoder

VOCABULARY = 11


class Kernel:
    """A backend whose rows say at which position they are."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.serves = True

    @property
    def kernels(self) -> dict[str, Callable[..., Any]]:
        return {"text.decode_rows": self.prepare}

    def prepare(self, plan: DecoderPlan) -> Callable[..., Tensor | None]:
        def rows(
            ids: Tensor,
            cache: Sequence[Tensor],
            tables: Tensor,
            sequence: Tensor,
            slot: Tensor,
            past: Tensor,
            position: Tensor,
            wanted: Tensor,
        ) -> Tensor | None:
            if not self.serves:
                return None
            self.calls.append(
                {
                    "ids": ids.tolist(),
                    "cache": [tuple(each.shape) for each in cache],
                    "tables": tables.tolist(),
                    "sequence": sequence.tolist(),
                    "slot": slot.tolist(),
                    "past": past.tolist(),
                    "position": position.tolist(),
                }
            )
            outputs = plan.width if plan.head is None else plan.vocabulary
            return position.to(plan.dtype)[wanted, None].expand(-1, outputs)

        return rows


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    made = Kernel()
    for module in (native_decode, row_decode):
        monkeypatch.setattr(module, "get_backend", lambda _: made)
    return made


def decoder(**options: Any) -> Decoder:
    with use_backend("torch"):
        base: dict[str, Any] = {"width": 16, "layers": 2, "heads": 4, "max_length": 600}
        return Decoder(DecoderConfig(**(base | options)), VOCABULARY).eval()


def served(model: Decoder) -> RowDecoder:
    made = row_decoder(model)
    assert made is not None
    return made


def test_rows_say_where_they_are_and_what_they_see(kernel: Kernel) -> None:
    rows = served(decoder(rotary_scaling=4.0, sliding_window=3))
    kernel.calls.clear()
    blocks = rows.new_blocks(5, 2, "float")
    tables = torch.tensor([[4, 0], [1, 3]])
    sequence, position = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 3])
    wanted = torch.tensor([1, 2])
    out = rows.decode(torch.tensor([7, 8, 9]), blocks, tables, sequence, position, wanted)
    assert out[:, 0].tolist() == [0.25, 0.75]
    assert kernel.calls == [
        {
            "ids": [7, 8, 9],
            "cache": [(5, 4, 2, 4)] * 4,
            "tables": [[4, 0], [1, 3]],
            "sequence": [0, 0, 1],
            "slot": [0, 1, 3],
            "past": [0, 1, 2],
            "position": [0.0, 0.25, 0.75],
        }
    ]


@pytest.mark.parametrize("numbers", ["float", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_take_the_bytes_that_are_said(numbers: Any, dtype: torch.dtype) -> None:
    model = decoder(kv_heads=2)
    model.set_dtype(dtype)
    rows = served(model)
    blocks = rows.new_blocks(3, 8, numbers)
    assert sum(each.nbytes for each in blocks) == 3 * 8 * rows.bytes_per_position(numbers)
    cache = model.new_cache(1, numbers)
    with torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.int64), cache)
    assert rows.bytes_per_position(numbers) == cache.bytes_per_token()


def test_a_float_head_multiplies_row_by_row() -> None:
    model = decoder(float_parts=("head",), logit_scale=-1)
    model.head.weight.data.fill_(1.0)
    rows = served(model)
    zero = torch.zeros(3, dtype=torch.int64)
    position = torch.tensor([1, 2, 3])
    blocks = rows.new_blocks(1, 4, "float")
    out = rows.decode(zero, blocks, zero[:1, None], zero, position, torch.tensor([0, 2]))
    assert out.tolist() == [[16 * 1 / 2] * VOCABULARY, [16 * 3 / 2] * VOCABULARY]
    nothing = rows.decode(zero, blocks, zero[:1, None], zero, position, zero[:0])
    assert nothing.shape == (0, VOCABULARY)


@pytest.mark.parametrize(
    "options",
    [
        {"experts": 2},
        {"attention": "decoupled", "sem_dim": 4, "geo_dim": 4},
        {"activations": "float"},
        {"causal": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_decoders_are_not_served(options: dict[str, Any]) -> None:
    assert row_decoder(decoder(**options)) is None


def test_training_hooks_and_exact_runs_are_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    assert row_decoder(decoder().train()) is None
    watched = decoder()
    watched.blocks[0].register_forward_hook(lambda *_: None)
    assert row_decoder(watched) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert row_decoder(decoder()) is None
    monkeypatch.setattr(block_kernels, "is_exact", lambda: True)
    assert row_decoder(decoder()) is None


def test_a_kernel_that_declines_is_not_used(kernel: Kernel) -> None:
    rows = served(decoder())
    kernel.serves = False
    assert row_decoder(decoder()) is None
    zero = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(UsageProblem, match=r"text\.decode_rows: the kernel refuses"):
        rows.decode(zero, rows.new_blocks(1, 1, "float"), zero[None], zero, zero, zero)


def test_a_prompt_is_read_by_rows_in_calls_of_limited_size(kernel: Kernel) -> None:
    model = decoder(max_length=600)
    cache = model.new_cache(2)
    ids = torch.arange(2 * 300).view(2, 300) % VOCABULARY
    with torch.no_grad():
        logits = model.next_logits(ids, cache)
    assert logits[:, 0].tolist() == [299.0, 299.0]
    assert cache.length == 300
    assert [len(each["ids"]) for each in kernel.calls] == [256, 256, 88]
    first = kernel.calls[0]
    assert first["tables"] == [[0], [1]]
    assert first["ids"] == [*ids[0, :128].tolist(), *ids[1, :128].tolist()]
    assert first["sequence"] == [0] * 128 + [1] * 128
    assert first["slot"] == first["past"] == [*range(128), *range(128)]
    assert kernel.calls[2]["slot"] == [*range(256, 300), *range(256, 300)]


def test_a_prompt_with_a_sliding_window_sees_its_latest_positions(kernel: Kernel) -> None:
    model = decoder(sliding_window=3)
    cache = model.new_cache(1)
    with torch.no_grad():
        for _ in range(2):
            model.next_logits(torch.tensor([[1, 2, 3, 4]]), cache)
    assert kernel.calls[0]["past"] == [0, 1, 2, 2]
    # The cache kept the two positions that may still be seen.
    assert kernel.calls[1]["slot"] == [2, 3, 4, 5]
    assert kernel.calls[1]["past"] == [2, 2, 2, 2]
    assert kernel.calls[1]["position"] == [4.0, 5.0, 6.0, 7.0]


def test_gradients_and_watched_models_read_a_prompt_by_modules(kernel: Kernel) -> None:
    model = decoder()
    ids = torch.tensor([[1, 2, 3]])
    model.next_logits(ids, model.new_cache(1))
    watched = decoder()
    watched.register_forward_hook(lambda *_: None)
    with torch.no_grad():
        watched.next_logits(ids, watched.new_cache(1))
        model(ids, model.new_cache(1))  # all logits are wanted
    assert kernel.calls == []
    kernel.serves = False
    with torch.no_grad():
        declined = model.next_logits(ids, model.new_cache(1))
        assert torch.equal(declined, model(ids, model.new_cache(1))[:, -1])
