"""llama.cpp computes what the decoder computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from arb_ternary_interchange.decoder.weights import TernaryWeight
from arb_ternary_text.data.shakespeare import load_text
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.trit_vector import TritVector

Make = Callable[..., Decoder]
Export = Callable[..., Path]

ARCHITECTURES = ["llama", "qwen3", "arcee", "bitnet"]
TEXT = "Now is the winter of our discontent\nMade glorious summer"

#: Largest difference of a log probability if llama.cpp rounds activations to float16, bfloat16 or
#: 8 bits.
ROUNDED = {"f16": 0.005, "bf16": 0.03, "tq1_0": 0.15, "tq2_0": 0.15, "q2_0": 0.1, "q4_0": 0.1}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_log_probabilities_are_those_of_the_float_model(
    make_decoder: Make, export: Export, llama_cpp: Any, ours: Any, architecture: str
) -> None:
    model = make_decoder(architecture)
    path = export(model, "f32")
    wanted = ours(model, TEXT.encode(), "float")[-1]
    torch.testing.assert_close(llama_cpp(path).log_probabilities(TEXT), wanted, atol=1e-4, rtol=0)
    half = llama_cpp(path, exact_cache=False)
    torch.testing.assert_close(half.log_probabilities(TEXT), wanted, atol=5e-3, rtol=0)


@pytest.mark.parametrize("kind", list(ROUNDED))
def test_every_type_loads_and_agrees(
    make_decoder: Make, export: Export, llama_cpp: Any, ours: Any, kind: str
) -> None:
    for architecture in ARCHITECTURES:
        model = make_decoder(architecture)
        found = llama_cpp(export(model, kind, name=architecture)).log_probabilities(TEXT)
        wanted = ours(model, TEXT.encode(), "float")[-1]
        torch.testing.assert_close(found, wanted, atol=ROUNDED[kind], rtol=0)


@pytest.mark.parametrize(("kind", "most"), [("f16", 0.005), ("bf16", 0.03), ("q8_0", 0.1)])
def test_rounded_floats_load_and_agree(
    make_decoder: Make, export: Export, llama_cpp: Any, ours: Any, kind: str, most: float
) -> None:
    model = make_decoder("llama", float_parts=("embedding", "head"))
    found = llama_cpp(export(model, "f32", float_kind=kind)).log_probabilities(TEXT)
    wanted = ours(model, TEXT.encode(), "float")[-1]
    torch.testing.assert_close(found, wanted, atol=most, rtol=0)


VARIANTS: list[dict[str, Any]] = [
    {"linear_scales": True},
    {"row_scales": True},
    {"row_scales": True, "vector_trits": 8, "learned_norms": True, "inner_gains": True},
    {"query_key_value_bias": True},
    {"rotary_factors": [1 + i / 8 for i in range(32)], "rotary_base": 5e5},
    {"rotary_scaling": 4.0},
    {"tie_embeddings": True},
    {"residual_scale": -2, "logit_scale": 3},
    {"head_dim": 32, "feed_forward": 320, "width": 192},
    {"stored_eps": True, "float_parts": ("norms",)},
    {"learned_norms": True},
    {"learned_norms": True, "inner_gains": True},
    {"float_parts": ("embedding", "head", "norms")},
]


def fits(architecture: str, options: dict[str, Any]) -> bool:
    """Whether there is such a decoder, and a graph of it in llama.cpp."""
    if architecture in ("qwen3", "bitnet") and "rotary_factors" in options:
        return False
    if architecture == "bitnet":
        return not {"query_key_value_bias", "head_dim"} & options.keys()
    return "stored_eps" not in options and (architecture == "qwen3" or "inner_gains" not in options)


@pytest.mark.parametrize("options", VARIANTS, ids=lambda options: " ".join(options))
def test_options_of_the_decoder_reach_llama_cpp(
    make_decoder: Make, export: Export, llama_cpp: Any, ours: Any, options: dict[str, Any]
) -> None:
    for architecture in ARCHITECTURES:
        if not fits(architecture, options):
            continue
        model = make_decoder(architecture, **options)
        stir(model)
        found = llama_cpp(export(model, "f32", name=architecture)).log_probabilities(TEXT)
        torch.testing.assert_close(
            found, ours(model, TEXT.encode(), "float")[-1], atol=1e-4, rtol=0
        )


def stir(model: Decoder) -> None:
    """Change everything that is one or zero in a new model, so that it has an influence."""
    generator = torch.Generator().manual_seed(1)
    for name, module in model.named_modules():
        if isinstance(getattr(module, "scale", None), torch.Tensor):
            module.scale.uniform_(0.5, 2, generator=generator)
        if (
            name.endswith(("output_norm", "hidden_norm"))
            and hasattr(module, "eps")
            and model.config.stored_eps
        ):
            module.eps = 0.3
        if isinstance(module, TritVector):
            shape = (module.shape.out_features, module.shape.in_features)
            module.set_trits(torch.randint(-1, 2, shape, generator=generator).to(torch.int8))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


def test_a_scale_of_any_linear_reaches_llama_cpp(
    make_decoder: Make, export: Export, llama_cpp: Any, ours: Any
) -> None:
    for architecture in ("llama", "arcee"):
        for part in ("query", "key", "value", "output", "gate", "up", "down", "head"):
            model = make_decoder(
                architecture, linear_scales=True, width=64, layers=1, feed_forward=64
            )
            for name, module in model.named_modules():
                if name.endswith(f".{part}") or name == part:
                    module.scale.fill_(1.7)
            found = llama_cpp(
                export(model, "f32", name=f"{architecture}-{part}")
            ).log_probabilities(TEXT)
            torch.testing.assert_close(
                found, ours(model, TEXT.encode(), "float")[-1], atol=1e-4, rtol=0
            )


class Scaled(torch.nn.Module):
    """A linear of another distribution: trits with a float scale."""

    def __init__(self, trits: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.trits = trits
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.trits * self.scale).mT

    def ternary_weight(self) -> TernaryWeight:
        rows, columns = self.trits.shape
        return TernaryWeight(
            self.trits, torch.zeros(rows, 1, dtype=torch.int8), columns, self.scale
        )


def test_linears_of_other_distributions_reach_llama_cpp(
    make_decoder: Make, export: Export, llama_cpp: Any, ours: Any
) -> None:
    model = make_decoder("arcee")
    for block in model.blocks:
        for holder, name in (
            (block.attention, "query"),
            (block.feed_forward, "up"),
            (block.feed_forward, "down"),
        ):
            setattr(holder, name, Scaled(getattr(holder, name).trits(), 0.07))
    found = llama_cpp(export(model, "f32")).log_probabilities(TEXT)
    torch.testing.assert_close(found, ours(model, TEXT.encode(), "float")[-1], atol=1e-4, rtol=0)


def test_greedy_text_is_that_of_the_float_model(
    make_decoder: Make, export: Export, llama_cpp: Any, ours: Any
) -> None:
    for architecture in ARCHITECTURES:
        model = make_decoder(architecture, float_parts=("head", "embedding"))
        table = model.head.weight if not model.config.tied else model.embedding.weight
        # printable characters only, so that every token is one of the text
        table.data[:32] = table.data[127:] = 0
        table.data *= 4
        ids = list(TEXT.encode())
        for _ in range(24):
            ids.append(int(ours(model, ids, "float")[-1].argmax()))
        text = llama_cpp(export(model, "f32", name=architecture)).generate(TEXT, 24)
        assert text == bytes(ids[len(TEXT) :]).decode()


def positions(server: Any, ids: Sequence[int], first: int, last: int) -> torch.Tensor:
    return torch.stack([server.log_probabilities(list(ids[: i + 1])) for i in range(first, last)])


def divergence(wanted: torch.Tensor, found: torch.Tensor) -> float:
    return float((wanted.exp() * (wanted - found)).sum(dim=1).mean())


@pytest.mark.parametrize("kind", ["tq2_0", "q2_0"])
def test_ternary_types_agree_with_int8_activations(
    make_decoder: Make, export: Export, llama_cpp: Any, ours: Any, kind: str
) -> None:
    model = make_decoder("llama")
    ids = load_text("validation")[:64].encode()
    found = positions(llama_cpp(export(model, kind)), ids, 40, 63)
    assert divergence(ours(model, ids, "int8")[40:63], found) <= 5e-4


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["tq2_0", "q2_0"])
def test_a_thousand_tokens_agree_with_int8_activations(
    make_decoder: Make, export: Export, llama_cpp: Any, ours: Any, architecture: str, kind: str
) -> None:
    model = make_decoder(architecture)
    server = llama_cpp(export(model, kind))
    wanted = []
    found = []
    targets = []
    text = load_text("validation").encode()
    for start in range(0, 4 * 256, 256):
        ids = text[start : start + 256]
        wanted.append(ours(model, ids, "int8")[:255])
        found.append(positions(server, ids, 0, 255))
        targets.append(torch.tensor(list(ids[1:])))
    ours_ = torch.cat(wanted)
    theirs = torch.cat(found)
    target = torch.cat(targets)
    loss = [-each.gather(1, target[:, None]).mean() for each in (ours_, theirs)]
    print(
        f"{architecture} {kind}: KL {divergence(ours_, theirs):.2e}, NLL {loss[0]:.4f} and "
        f"{loss[1]:.4f}"
    )
    assert divergence(ours_, theirs) <= 5e-4
    assert abs(float(loss[0] - loss[1])) <= 0.002
