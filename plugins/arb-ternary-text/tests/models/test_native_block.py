"""Native blocks give the results of the modules, up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from arb_ternary.backends.select import candidates, use_backend
from arb_ternary.ternary.embedding import TernaryRMSNorm
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_text.models import attention, native_block
from arb_ternary_text.models.attention import Attention, make_positions
from arb_ternary_text.models.block_kernels import kernels_for
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.feed_forward import FeedForward
from arb_ternary_text.models.rms_norm import RMSNorm
from arb_ternary_text.models.trit_vector import TritVector
from arb_ternary_train.exact_arithmetic import exact_arithmetic

if "cpu" not in [each.name for each in candidates() if each.usable]:
    pytest.skip("the backend cpu is not installed here", allow_module_level=True)

KINDS = ("swiglu", "relu2", "reglu2")
#: Nodes of attention by kernels, of attention by torch between native products, and of a
#: feed-forward layer.
WHOLE = ("_NormalizedProductsBackward", "_AttentionBackward")
PARTS = ("_NormalizedProductsBackward", "_TurnedHeadsBackward")
FEED_FORWARD = ("_NormalizedProductsBackward", "_ActivatedProductBackward")


@pytest.fixture(autouse=True)
def _cpu() -> Iterator[None]:
    with use_backend("cpu"):
        torch.manual_seed(0)
        yield


def config(**changes: Any) -> DecoderConfig:
    options: dict[str, Any] = {
        "width": 64,
        "layers": 2,
        "heads": 4,
        "feed_forward": 96,
        "max_length": 32,
    }
    return DecoderConfig(**(options | changes))


def ternary(module: nn.Module) -> dict[str, TernaryModule]:
    return {name: each for name, each in module.named_modules() if isinstance(each, TernaryModule)}


#: Options with which norms have gains and rows have factors: floats, or vectors of trits.
VECTORS: dict[str, dict[str, Any]] = {
    "floats": {"float_parts": ["norms"], "inner_gains": True, "row_scales": True},
    "trits": {"learned_norms": True, "inner_gains": True, "row_scales": True, "vector_trits": 16},
}


@torch.no_grad()
def draw_vectors(module: nn.Module) -> None:
    """Give gains and factors random values around 1."""
    for each in module.modules():
        if isinstance(each, TritVector):
            each.set_trits(
                torch.randint(
                    -1, 2, (each.shape.out_features, each.shape.in_features), dtype=torch.int8
                )
            )
    for name, parameter in module.named_parameters():
        if name.endswith(("norm.weight", "row_scale")):
            parameter.uniform_(0.6, 1.4)


def votes(module: nn.Module) -> dict[str, Tensor]:
    return {name: each.local_votes().clone() for name, each in ternary(module).items()}


def far(found: Tensor, wanted: Tensor) -> float:
    """Return the distance relative to the norm."""
    return float(
        (found.detach().double() - wanted.detach()).norm() / wanted.detach().double().norm()
    )


def is_native(y: Tensor, *names: str) -> bool:
    """Return whether the graph behind ``y`` has all of these nodes."""
    seen = set()
    left = [y.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [next_node for next_node, _ in node.next_functions]
    found = {type(node).__name__ for node in seen if node is not None}
    return all(name in found for name in names)


def both(
    call: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, *nodes: str
) -> tuple[list[Any], list[Any]]:
    """Return results by kernels, whose graph has these nodes, and by torch's operations.

    The results are the output, the gradient of ``x``, votes, and gradients of parameters.
    """
    results = []
    weights = torch.randn(call(x).shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    for exact in (False, True):
        for each in ternary(module).values():
            each.set_votes(
                torch.zeros(each.shape.out_features, each.shape.in_features, dtype=torch.int8)
            )
            each.control.zero_()
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        with exact_arithmetic(exact):
            y = call(leaf)
            y.backward(weights)  # type: ignore[no-untyped-call]
        assert is_native(y, *nodes) is not exact
        given = {
            name: each.grad.clone()
            for name, each in module.named_parameters()
            if each.grad is not None
        }
        results.append([y.detach(), leaf.grad, votes(module), given])
    return results[0], results[1]


def assert_alike(fused: list[Any], wanted: list[Any], dtype: torch.dtype) -> None:
    """Assert that results are equal up to elements that round to a different int8 step.

    One step of the quantiser is 1 / 127 of the largest element of a row. In float32 one element in
    thousands rounds differently; in bfloat16, where torch rounds to 8 bits first, up to every
    second one.
    """
    bound = 3e-3 if dtype == torch.float32 else 3e-2
    assert far(fused[0], wanted[0]) < bound
    assert far(fused[1], wanted[1]) < (bound if dtype == torch.float32 else 6e-2)
    for name, found in fused[2].items():
        assert (found != wanted[2][name]).float().mean() < (
            0.01 if dtype == torch.float32 else 0.1
        ), name
    assert fused[3].keys() == wanted[3].keys()
    for name, found in fused[3].items():
        assert far(found, wanted[3][name]) < (2 * bound if dtype == torch.float32 else 6e-2), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradients", ["float", "int8"])
@pytest.mark.parametrize("activation", KINDS)
@pytest.mark.parametrize("sub_norms", [True, False])
def test_feed_forward_equals_torch(
    dtype: torch.dtype, gradients: Any, activation: Any, sub_norms: bool
) -> None:
    layer = FeedForward(
        config(activation=activation, gradients=gradients, sub_norms=sub_norms, group_size=32)
    )
    fused, wanted = both(layer, layer, torch.randn(3, 8, 64, dtype=dtype) * 2, *FEED_FORWARD)
    assert_alike(fused, wanted, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("options", "longest", "nodes"),
    [
        ({"gradients": "int8", "query_key_norm": True}, 8, WHOLE),
        ({"kv_heads": 2, "sub_norms": False}, 8, WHOLE),
        ({"gradients": "int8", "query_key_norm": True}, 7, PARTS),
        (
            {"sliding_window": 3, "query_key_norm": True, "stored_eps": True, "group_size": "row"},
            8,
            PARTS,
        ),
        ({"causal": False, "head_dim": 6}, 8, PARTS),
    ],
    ids=["int8 gradients", "grouped heads", "long", "a window", "not causal"],
)
def test_attention_equals_torch(
    dtype: torch.dtype,
    options: dict[str, Any],
    longest: int,
    nodes: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "_LONGEST", longest)
    of = config(**options)
    layer = Attention(of)
    x = torch.randn(2, 8, 64, dtype=dtype) * 2
    positions = make_positions(of, x, start=0, total=8, window=of.sliding_window)
    fused, wanted = both(lambda leaf: layer(leaf, positions), layer, x, *nodes)
    assert_alike(fused, wanted, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", KINDS)
@pytest.mark.parametrize("vectors", VECTORS)
def test_feed_forward_with_gains_and_factors_equals_torch(
    dtype: torch.dtype, activation: Any, vectors: str
) -> None:
    layer = FeedForward(
        config(activation=activation, sub_norms=True, group_size="row", **VECTORS[vectors])
    )
    draw_vectors(layer)
    fused, wanted = both(layer, layer, torch.randn(3, 8, 64, dtype=dtype) * 2, *FEED_FORWARD)
    assert_alike(fused, wanted, dtype)
    # Linears, two norms and three or two factors: none is missing on both sides.
    assert len(fused[2]) + len(fused[3]) == (6 if activation == "relu2" else 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("options", "nodes"),
    [({}, WHOLE), ({"kv_heads": 2}, WHOLE), ({"sliding_window": 3}, PARTS)],
    ids=str,
)
@pytest.mark.parametrize("vectors", VECTORS)
def test_attention_with_gains_and_factors_equals_torch(
    dtype: torch.dtype, options: dict[str, Any], nodes: tuple[str, ...], vectors: str
) -> None:
    of = config(
        query_key_norm=True, sub_norms=True, group_size="row", **options, **VECTORS[vectors]
    )
    layer = Attention(of)
    draw_vectors(layer)
    x = torch.randn(2, 8, 64, dtype=dtype) * 2
    positions = make_positions(of, x, start=0, total=8, window=of.sliding_window)
    fused, wanted = both(lambda leaf: layer(leaf, positions), layer, x, *nodes)
    assert_alike(fused, wanted, dtype)
    assert len(fused[2]) + len(fused[3]) == 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vectors", [{}, *VECTORS.values()], ids=["none", *VECTORS])
def test_final_norm_and_head_equal_torch(dtype: torch.dtype, vectors: dict[str, Any]) -> None:
    model = Decoder(config(gradients="int8", zero_head=False, logit_scale=-1, **vectors), 48)
    draw_vectors(model)
    x = torch.randn(2, 8, 64, dtype=dtype) * 2
    fused, wanted = both(model.logits, model, x, "_NormalizedProductsBackward")
    assert fused[0].shape == (2, 8, 48)
    assert_alike(fused, wanted, dtype)


@pytest.mark.parametrize("vectors", VECTORS)
def test_vectors_learn_where_linears_and_inputs_do_not(vectors: str) -> None:
    layer = FeedForward(
        config(
            activation="swiglu",
            group_size="row",
            sub_norms=False,
            query_key_norm=True,
            **VECTORS[vectors],
        )
    )
    draw_vectors(layer)
    silent = {name for name, each in ternary(layer).items() if not isinstance(each, TritVector)}
    for name in silent:
        ternary(layer)[name].frozen = True
    y = layer(torch.randn(4, 64))
    assert is_native(y, *FEED_FORWARD)
    y.square().sum().backward()  # type: ignore[no-untyped-call]
    assert {name for name, held in votes(layer).items() if name in silent and held.any()} == set()
    learning = [each.grad for each in layer.parameters()] + [
        each.local_votes() for each in layer.modules() if isinstance(each, TritVector)
    ]
    assert len(learning) == 4
    assert all(each is not None and each.any() for each in learning)


def test_attention_keeps_neither_scores_nor_turned_heads() -> None:
    of = config(query_key_norm=True)
    length = 512
    layer = Attention(of)
    x = torch.randn(1, length, 64, requires_grad=True)
    kept: dict[int, int] = {}  # elements by address: two nodes may keep the same tensor

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x, make_positions(of, x, start=0, total=length, window=None))
    # Rows before the norm and int8 rows; queries, keys, values; the output of attention and its
    # int8 rows.
    assert max(kept.values()) == length * 64
    assert sum(size == length * 64 for size in kept.values()) == 7


@pytest.mark.parametrize("activation", KINDS)
def test_gradients_pass_straight_through_quantisation(activation: Any) -> None:
    layer = FeedForward(config(activation=activation))
    x = (torch.randn(4, 5, 64) * 2).requires_grad_()
    y = layer(x)
    weights = torch.randn(y.shape)
    y.backward(weights)

    def rounded(rows: Tensor) -> Tensor:
        step = rows.detach().abs().amax(-1, keepdim=True) / 127
        return rows + ((rows / step).round() * step - rows).detach()

    def product(name: str, rows: Tensor) -> Tensor:
        weight: Tensor = ternary(layer)[name].dense_weight()
        return rounded(rows) @ weight.double().T

    def normed(rows: Tensor) -> Tensor:
        return rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    leaf = x.detach().double().requires_grad_()
    inside = normed(leaf)
    up = product("up", inside)
    if activation == "relu2":
        hidden = F.relu(up).square()
    else:
        gate = product("gate", inside)
        hidden = (F.silu(gate) if activation == "swiglu" else F.relu(gate).square()) * up
    wanted = product("down", normed(hidden))
    wanted.backward(weights.double())  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert x.grad is not None
    # float32 sums, and the few elements that lie next to a tie; see assert_alike.
    assert far(y, wanted) < 3e-3
    assert far(x.grad, leaf.grad) < 3e-3


@pytest.mark.parametrize("gradients", ["float", "int8"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("needs_input", [False, True])
def test_integers_of_a_linear_equal_those_of_its_op(
    gradients: str, frozen: bool, needs_input: bool
) -> None:
    linear = TernaryLinear(40, 24, gradients=gradients, group_size=32)
    linear.frozen = frozen
    x = torch.randn(6, 40)
    grad = torch.randn(6, 24)

    def product_by_kernels(rows: Tensor) -> Tensor:
        kernels = kernels_for(x, (), (linear,))
        assert kernels is not None
        (product,) = native_block.normalized_products(kernels, rows, nn.Identity(), (linear,))
        return native_block.scaled(kernels, product)

    results = []
    for call in (product_by_kernels, linear):
        linear.commit_votes()
        linear.set_votes(torch.zeros(24, 40, dtype=torch.int8))
        linear.exponent_votes.zero_()
        linear.stats.zero_()
        linear.control.copy_(torch.tensor([5, 7, 11, 3]))
        leaf = x.clone().requires_grad_(needs_input)
        y = call(leaf)
        if y.requires_grad:
            y.backward(grad)
        assert (leaf.grad is not None) == needs_input
        given = [] if leaf.grad is None else [leaf.grad]
        changed = (linear.local_votes(), linear.exponent_votes, linear.stats, linear.control)
        results.append([y.detach(), *given, *(each.clone() for each in changed)])
    assert bool(linear.local_votes().any()) != frozen
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)


def loss_of(model: Decoder, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).view(-1, 50), tokens.view(-1))


@pytest.mark.parametrize("vectors", [{}, VECTORS["trits"]], ids=["none", "trits"])
def test_recomputed_blocks_cast_the_same_votes(vectors: dict[str, Any]) -> None:
    tokens = torch.randint(0, 50, (2, 16))
    found = []
    for recomputes in (False, True):
        torch.manual_seed(3)
        model = Decoder(config(gradients="int8", **vectors), 50)
        model.set_activation_checkpointing(recomputes)
        loss = loss_of(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        found.append((loss.detach(), votes(model)))
    assert torch.equal(found[0][0], found[1][0])
    for name, held in found[0][1].items():
        assert torch.equal(held, found[1][1][name]), name


def test_without_gradients_the_bits_are_the_same() -> None:
    model = Decoder(config(), 50)
    tokens = torch.randint(0, 50, (2, 16))
    with_graph = model(tokens)
    assert is_native(with_graph, *FEED_FORWARD, *WHOLE)
    with torch.no_grad():
        assert torch.equal(model(tokens), with_graph)


def test_frozen_modules_cast_nothing_and_pass_the_gradient() -> None:
    torch.manual_seed(3)
    model = Decoder(config(activation="swiglu"), 50)
    tokens = torch.randint(0, 50, (2, 16))
    silent = {
        "blocks.0.attention.key",
        "blocks.1.feed_forward.gate",
        "blocks.1.feed_forward.up",
        "blocks.1.feed_forward.down",
    }
    for name, each in ternary(model).items():
        each.frozen = name in silent
    loss_of(model, tokens).backward()  # type: ignore[no-untyped-call]
    assert {name for name, held in votes(model).items() if not held.any()} == silent
    for each in ternary(model).values():
        each.frozen = True
    assert not loss_of(model, tokens).requires_grad


def test_frozen_layers_give_the_gradient_of_their_input() -> None:
    layer = FeedForward(config())
    for each in ternary(layer).values():
        each.frozen = True
    x = torch.randn(2, 64, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.any()
    assert not any(held.any() for held in votes(layer).values())


def test_votes_are_undone_and_summed_over_microbatches() -> None:
    model = Decoder(config(), 50)
    tokens = torch.randint(0, 50, (2, 16))
    loss_of(model, tokens).backward()  # type: ignore[no-untyped-call]
    assert all(held.any() for held in votes(model).values())
    for each in ternary(model).values():
        each.undo_votes()
        each.sum_votes()
    assert not any(held.any() for held in votes(model).values())
    for place in range(2):
        for each in ternary(model).values():
            each.begin_microbatch(place)
        loss_of(model, tokens).backward()  # type: ignore[no-untyped-call]
        for each in ternary(model).values():
            each.end_microbatch()
    assert not any(held.any() for held in votes(model).values())
    for name, each in ternary(model).items():
        assert each.sums is not None
        assert each.casts == 2, name
        assert each.sums.votes.abs().max() == 2, name


def test_watchers_are_called_before_each_cast() -> None:
    model = Decoder(config(layers=1), 50)
    tokens = torch.randint(0, 50, (2, 16))
    heard: list[str] = []
    for name, each in ternary(model).items():
        each.sum_votes()

        def hears(name: str = name, each: TernaryModule = each) -> None:
            assert not each.has_cast_all
            heard.append(name)

        each.on_backward = hears
    loss_of(model, tokens).backward()  # type: ignore[no-untyped-call]
    assert sorted(heard) == sorted(ternary(model))
    assert all(each.has_cast_all for each in ternary(model).values())


def plain() -> tuple[RMSNorm, TernaryLinear]:
    return RMSNorm(64, eps=1e-6, gain=False), TernaryLinear(64, 64)


def test_plain_modules_use_kernels() -> None:
    norm, linear = plain()
    for dtype in (torch.float32, torch.bfloat16):
        assert (
            kernels_for(torch.ones(2, 64, dtype=dtype), (norm, nn.Identity()), (linear, linear))
            is not None
        )


def _hooked(norm: nn.Module, linear: nn.Module) -> None:
    linear.register_forward_hook(lambda *_: None)


def _watched_norm(norm: nn.Module, linear: nn.Module) -> None:
    norm.register_forward_pre_hook(lambda *_: None)


def _replaced(norm: nn.Module, linear: nn.Module) -> None:
    linear.forward = lambda x: x


def _float(norm: nn.Module, linear: nn.Module) -> None:
    assert isinstance(linear, TernaryLinear)
    linear.activations = "float"


def _on_torch(norm: nn.Module, linear: nn.Module) -> None:
    assert isinstance(linear, TernaryLinear)
    linear.set_backend("torch")


@pytest.mark.parametrize("change", [_hooked, _watched_norm, _replaced, _float, _on_torch])
def test_changed_modules_use_torch(
    change: Callable[[nn.Module, nn.Module], None],
) -> None:
    norm, linear = plain()
    change(norm, linear)
    assert kernels_for(torch.ones(2, 64), (norm,), (linear,)) is None


@pytest.mark.parametrize(("longest", "nodes"), [(8, WHOLE), (7, PARTS)], ids=["whole", "parts"])
def test_attention_under_autocast_equals_torch(
    longest: int, nodes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_LONGEST", longest)
    of = config(gradients="int8", query_key_norm=True)
    layer = Attention(of)
    x = torch.randn(2, 8, 64) * 2
    positions = make_positions(of, x, start=0, total=8, window=None)
    with torch.autocast("cpu", torch.bfloat16):
        fused, wanted = both(lambda leaf: layer(leaf, positions), layer, x, *nodes)
    assert fused[0].dtype is wanted[0].dtype is torch.bfloat16
    assert fused[1].dtype is wanted[1].dtype is torch.float32
    assert_alike(fused, wanted, torch.bfloat16)


@pytest.mark.parametrize("activation", KINDS)
def test_feed_forward_under_autocast_equals_torch(activation: Any) -> None:
    layer = FeedForward(config(activation=activation, gradients="int8", group_size=32))
    with torch.autocast("cpu", torch.bfloat16):
        fused, wanted = both(layer, layer, torch.randn(3, 8, 64) * 2, *FEED_FORWARD)
    assert fused[0].dtype is wanted[0].dtype is torch.bfloat16
    assert fused[1].dtype is wanted[1].dtype is torch.float32
    assert_alike(fused, wanted, torch.bfloat16)


class _Own(TernaryLinear):
    """A user-defined linear."""


def test_other_modules_and_tensors_use_torch() -> None:
    norm, linear = plain()
    x = torch.ones(2, 64)
    for other in (_Own(64, 64), TernaryLinear(64, 64, bias=True), nn.Linear(64, 64)):
        assert kernels_for(x, (norm,), (linear, other)) is None
    for other in (TernaryRMSNorm(64), nn.RMSNorm(64), nn.LayerNorm(64)):
        assert kernels_for(x, (other,), (linear,)) is None
    for tensor in (x.double(), x.half(), x[:0], nn.Parameter(x)):
        assert kernels_for(tensor, (norm,), (linear,)) is None
    with FakeTensorMode():
        assert kernels_for(torch.ones(2, 64), (norm,), (linear,)) is None
    with torch.autocast("cpu", torch.float16):
        assert kernels_for(x, (norm,), (linear,)) is None
    with exact_arithmetic():
        assert kernels_for(x, (norm,), (linear,)) is None
