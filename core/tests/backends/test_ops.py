"""The ops: schemas, fakes and autograd through ``opcheck``, and one graph under
``torch.compile``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from arb_ternary import TernaryEmbedding, TernaryLinear, TernaryRMSNorm
from arb_ternary.backends import ops
from arb_ternary.backends.registration import Op
from arb_ternary.backends.select import candidates, current_backend, use_backend
from arb_ternary.backends.vote_state import VoteLimits, VoteState
from arb_ternary.counters.hashing import MICRO
from arb_ternary.ternary.models import ternary_modules
from arb_ternary.ternary.module import TernaryModule


def scale_votes(module: TernaryModule, integer: bool = False) -> None:
    """Use scaled votes of a size with which many are cast."""
    module.use_scaled_votes(integer=integer)
    assert module.vote_scale is not None
    module.vote_scale.fill_(1 if integer else 0.5)
    module.limits = VoteLimits(700, 2)


MODES = [("int8", "float"), ("int8", "int8"), ("float", "float"), ("float", "int8")]
USABLE = [found.name for found in candidates() if found.usable]
#: The reference, and the backend that `auto` chooses. Others may compile at first use.
QUICK = ("torch", USABLE[0])


def backend_param(*values: Any, quick: bool) -> Any:
    return pytest.param(*values, marks=() if quick else pytest.mark.extended)


every_backend = pytest.mark.parametrize(
    "backend", [backend_param(name, quick=name in QUICK) for name in USABLE]
)


def compiled_on(choices: Sequence[Any]) -> list[Any]:
    """Return each choice with each backend.

    A compiled graph has ops, not kernels, so all choices on torch and one on another are enough.
    """
    params = []
    for choice in choices:
        for name in USABLE:
            quick = name == "torch" or (name in QUICK and choice == choices[0])
            params.append(backend_param(choice, name, quick=quick))
    return params


Arguments = tuple[Any, ...]


def linear_arguments(
    activations: str, gradients: str, bias: bool = True, scaled: bool = False
) -> Arguments:
    layer = TernaryLinear(40, 33, group_size=32, activations=activations, gradients=gradients)
    if scaled:
        scale_votes(layer)
    x = torch.randn(6, 40, requires_grad=True)
    bias_N = torch.randn(33, requires_grad=True) if bias else None
    return (x, layer.anchor, bias_N, *layer.vote_state(), activations, gradients)


def embedding_arguments(rule: str, scaled: bool = False) -> Arguments:
    table = TernaryEmbedding(20, 12, group_size=32, scale_rule=rule)  # type: ignore[arg-type]
    if scaled:
        scale_votes(table)
    ids = torch.tensor([3, 3, 19, 0])
    return (ids, table.anchor, *table.vote_state(), torch.float32, "float")


def vote_arguments(rule: str, scaled: bool = False) -> Arguments:
    """Return the state of the votes of an embedding, or, without a rule, of a linear."""
    if rule:
        return (
            torch.tensor([3, 3, 19, 0]),
            torch.randn(4, 12),
            None,
            *embedding_arguments(rule, scaled)[2:-2],
        )
    return (*int8_operands(), *linear_arguments("int8", "int8", scaled=scaled)[3:-2])


def int8_operands() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.randint(-9, 9, (6, 33), dtype=torch.int8)
    return g, torch.randint(-9, 9, (6, 40), dtype=torch.int8), torch.tensor(0.5)


def input_gradient_arguments() -> Arguments:
    state = TernaryLinear(40, 33, group_size=32).vote_state()
    return (
        torch.randn(6, 33),
        None,
        state.weight,
        state.exponent,
        state.sizes,
        torch.float32,
        state.backend,
    )


def bias_arguments() -> Arguments:
    layer = TernaryLinear(8, 5, bias=True)
    return (layer.anchor, layer.bias, layer.bias_exponent, layer.bias_votes)


CASES: dict[str, Callable[[], Arguments]] = {
    **{f"linear[{a}-{g}]": (lambda a=a, g=g: linear_arguments(a, g)) for a, g in MODES},
    "linear[no bias]": lambda: linear_arguments("int8", "float", bias=False),
    "embedding[residual]": lambda: embedding_arguments("residual"),
    "embedding[correlation]": lambda: embedding_arguments("correlation"),
    "linear[scaled]": lambda: linear_arguments("int8", "int8", scaled=True),
    "embedding[scaled]": lambda: embedding_arguments("residual", scaled=True),
    "cast_votes": lambda: vote_arguments(""),
    "cast_votes[scaled]": lambda: vote_arguments("", scaled=True),
    "cast_embedding_votes": lambda: vote_arguments("correlation"),
    "cast_embedding_votes[scaled]": lambda: vote_arguments("residual", scaled=True),
    "linear_grad_input": input_gradient_arguments,
    "quantize_gradient": lambda: (
        torch.randn(3, 4),
        torch.tensor([1, 2, 3, 4]),
        0,
        current_backend(),
    ),
    "bias": bias_arguments,
    "cast_bias_votes": lambda: (torch.randn(5), torch.zeros(5, dtype=torch.int8)),
}


@every_backend
@pytest.mark.parametrize("case", CASES)
def test_opcheck_accepts(case: str, backend: str) -> None:
    op = getattr(torch.ops.arb_ternary, case.split("[")[0]).default
    with use_backend(backend):
        arguments = CASES[case]()
    assert set(torch.library.opcheck(op, arguments).values()) == {"SUCCESS"}


def test_every_op_of_the_namespace_is_checked() -> None:
    registered = {
        name for name in dir(torch.ops.arb_ternary) if isinstance(vars(ops).get(name), Op)
    }
    assert registered == {case.split("[")[0] for case in CASES}


@every_backend
def test_a_second_derivative_is_an_error_and_not_a_wrong_number(backend: str) -> None:
    with use_backend(backend):
        layer = TernaryLinear(40, 33, group_size=32)
    x = torch.randn(6, 40, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


class Model(nn.Module):
    def __init__(self, activations: str, gradients: str) -> None:
        super().__init__()
        self.table = TernaryEmbedding(30, 40, gradients=gradients)
        self.norm = TernaryRMSNorm(40, gradients=gradients)
        self.hidden = TernaryLinear(
            40, 24, bias=True, group_size=32, activations=activations, gradients=gradients
        )
        self.head = TernaryLinear(24, 30, activations=activations, gradients=gradients)

    def forward(self, ids: Tensor) -> Tensor:
        # The hidden layer is used twice on purpose: both uses vote.
        x = self.norm(self.table(ids))
        return self.head(torch.relu(self.hidden(x)) + self.hidden(torch.relu(x)))


@pytest.mark.parametrize(("mode", "backend"), compiled_on(MODES))
def test_a_compiled_model_is_one_graph_and_casts_the_same_votes(
    mode: tuple[str, str], backend: str
) -> None:
    ids = torch.randint(0, 30, (4, 7))
    states = []
    torch._dynamo.reset()  # every backend and mode is another graph, and their number is limited
    for compiled in (False, True):
        torch.manual_seed(1)
        with use_backend(backend):
            model = Model(*mode)
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        for _ in range(3):
            run(ids).square().sum().backward()
        states.append(model.state_dict())
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key
    assert int(states[0]["hidden.votes"].abs().sum()) > 0


@pytest.mark.parametrize(("integer", "backend"), compiled_on([False, True]))
def test_a_compiled_model_casts_scaled_votes_without_recompiling(
    integer: bool, backend: str
) -> None:
    ids = torch.randint(0, 30, (4, 7))
    states = []
    for compiled in (False, True):
        torch.manual_seed(1)
        torch._dynamo.reset()
        graphs = CompileCounterWithBackend("aot_eager")
        with use_backend(backend):
            model = Model("int8", "int8")
        for _, module in ternary_modules(model):
            scale_votes(module, integer)
        run = torch.compile(model, fullgraph=True, backend=graphs) if compiled else model
        for step in range(3):
            for _, module in ternary_modules(model):
                assert module.vote_scale is not None
                module.vote_scale.copy_(module.vote_scale * 2)
                module.limits = VoteLimits(300 + step)
                module.commit_votes()  # as a step does
            run(ids).square().sum().backward()
        assert graphs.frame_count == int(compiled)
        magnitudes = {
            f"{name}.magnitudes": module.magnitudes for name, module in ternary_modules(model)
        }
        states.append(model.state_dict() | magnitudes)
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key
    assert int(states[0]["hidden.votes"].abs().sum()) > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own imports warn
def test_inductor_compiles_training_without_a_graph_break() -> None:
    model = Model("int8", "float")
    ids = torch.randint(0, 30, (4, 7))
    compiled = torch.compile(model, fullgraph=True)
    compiled(ids).square().sum().backward()
    assert int(model.hidden.votes.abs().sum()) > 0


def test_backward_casts_exactly_the_sign_of_the_dense_gradient() -> None:
    layer = TernaryLinear(12, 7, group_size=32, activations="float")
    x = torch.randn(5, 12)
    target = torch.randn(5, 7)
    dense = layer.dense_weight().requires_grad_()
    ((x @ dense.t() - target) ** 2).sum().backward()
    ((layer(x) - target) ** 2).sum().backward()
    assert dense.grad is not None
    assert torch.equal(layer.votes, -dense.grad.sign().to(torch.int8))
    score = (dense.grad.sign() * layer.trits()).sum(dim=1, keepdim=True)
    assert torch.equal(layer.exponent_votes, -score.sign().to(torch.int8))
    torch.testing.assert_close(
        layer.gradient_square_sum(), dense.grad.square().sum(), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_votes_are_cast_of_the_transformed_gradient(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    def only_first_row(
        grad: Tensor, x: Tensor, scale: Tensor | None, state: VoteState
    ) -> tuple[Any, ...]:
        state.stats[0] += 5  # of the module itself, while the cast counts elsewhere
        kept = torch.zeros_like(grad)
        kept[:, 0] = -grad[:, 0]
        return kept, x, scale, state._replace(stats=torch.zeros_like(state.stats))

    monkeypatch.setitem(
        sys.modules, "a_rule", cast("ModuleType", SimpleNamespace(transform=only_first_row))
    )
    torch._dynamo.reset()
    layer = TernaryLinear(12, 7, group_size=32, activations="float")
    layer.transform = "a_rule:transform"
    x = torch.randn(5, 12)
    grad = torch.randn(5, 7)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    run(x).backward(grad)
    dense = grad.t() @ x
    assert torch.equal(layer.votes[0], dense[0].sign().to(torch.int8))
    assert not layer.votes[1:].any()
    assert layer.stats.tolist() == [5.0] + [0.0] * 19
    assert int(layer.control[MICRO]) == 1


@pytest.mark.parametrize("activations", ["float", "int8"])
def test_backward_casts_scaled_votes_and_sums_magnitudes(activations: str) -> None:
    layer = TernaryLinear(64, 32, activations=activations)
    layer.use_scaled_votes()
    assert layer.vote_scale is not None
    assert layer.magnitudes is not None
    # Whole numbers whose rows have the maximum 127: int8 activations hold them exactly.
    x = torch.randint(-9, 10, (5, 64)).float()
    x[:, 0] = 127.0
    grad = torch.randint(-9, 10, (5, 32)).float()
    layer.vote_scale.fill_(0.25)
    layer.limits = VoteLimits(32000)
    for _ in range(2):
        layer(x).backward(grad)
    dense = grad.t() @ x
    torch.testing.assert_close(
        layer.magnitudes, 2 * torch.cat([dense.abs().sum(1), dense.abs().sum(0)])
    )
    assert int(layer.control[MICRO]) == 2
    inside = dense.abs() < 800
    # Each of the two votes is g / 16, rounded down or up.
    assert int(inside.sum()) > 1000
    assert float((layer.votes + dense / 8)[inside].abs().max()) < 2.0
    assert bool(((layer.votes.float() / 2).frac() != 0).any()), "both votes were rounded alike"


def test_an_initial_scale_casts_no_vote_but_sums_magnitudes() -> None:
    table = TernaryEmbedding(9, 40)
    table.use_scaled_votes()
    assert table.magnitudes is not None
    table(torch.tensor([1, 1, 4])).sum().backward()
    assert not table.votes.any()
    assert table.magnitudes[:9].tolist() == [0, 80, 0, 0, 40, 0, 0, 0, 0]
    table.clear_stats()
    assert not table.magnitudes.any()


@every_backend
@pytest.mark.parametrize("gradients", ["float", "int8"])
def test_the_correlation_counts_signs_under_scaled_votes(gradients: str, backend: str) -> None:
    with use_backend(backend):
        table = TernaryEmbedding(
            5, 40, group_size=32, scale_rule="correlation", gradients=gradients
        )
    table.set_trits(torch.randint(-1, 2, (5, 40), dtype=torch.int8))
    table.use_scaled_votes()
    assert table.vote_scale is not None
    table.vote_scale.fill_(1.0)
    gradient = torch.randn(4, 40).sign() * torch.randint(2, 60, (4, 40))
    gradient[3] = gradient[1]  # ids that come twice are summed first, here to zero
    gradient[3] *= -1
    table(torch.tensor([3, 0, 4, 0])).backward(gradient)
    score = torch.zeros(5, 2, dtype=torch.int64)
    for row, g in ((3, gradient[0]), (4, gradient[2])):
        product = g.sign() * table.trits()[row]
        score[row] = torch.stack([product[:32].sum(), product[32:].sum()]).long()
    assert table.correlation is not None
    assert table.steps is not None
    assert torch.equal(table.correlation.long(), score)
    assert table.steps[:, 0].tolist() == [1, 0, 0, 1, 1]
    assert table.votes.any()


def test_scaled_votes_out_of_their_range_are_refused() -> None:
    layer = TernaryLinear(6, 4, activations="float", gradients="int8")
    with pytest.raises(ValueError, match="integer votes need"):
        layer.use_scaled_votes(integer=True)
    for bad in (0, 32513):
        with pytest.raises(ValueError, match=r"vote_limit must be in 1\.\.32512"):
            layer.limits = VoteLimits(vote_limit=bad)
    for bad in (-1, 32):
        with pytest.raises(ValueError, match=r"exponent_shift must be in 0\.\.31"):
            layer.limits = VoteLimits(exponent_shift=bad)
    for bad in (-1, 17):
        with pytest.raises(ValueError, match=r"noise_shift must be in 0\.\.16"):
            layer.limits = VoteLimits(noise_shift=bad)
    layer.use_scaled_votes()
    layer.vote_limits.fill_(0)
    with pytest.raises(ValueError, match="vote_limit"):
        layer(torch.randn(3, 6)).sum().backward()
    layer.limits = VoteLimits()
    layer.vote_scale = torch.zeros(10, dtype=torch.int32)
    with pytest.raises(ValueError, match="int8 gradient"):
        layer(torch.randn(3, 6)).sum().backward()


def test_the_straight_through_gradient_passes_the_quantiser() -> None:
    layer = TernaryLinear(12, 7)
    x = torch.randn(5, 12, requires_grad=True)
    g = torch.randn(5, 7)
    layer(x).backward(g)
    torch.testing.assert_close(x.grad, g @ layer.dense_weight(), rtol=1e-5, atol=1e-6)


def test_micro_batches_each_cast_their_votes() -> None:
    layer = TernaryLinear(6, 4, activations="float")
    x = torch.randn(3, 6)
    g = torch.randn(3, 4)
    sign = (g.t() @ x).sign().to(torch.int8)
    for n in range(1, 6):
        layer(x).backward(g)
        assert torch.equal(layer.votes, -n * sign)
    assert int(layer.control[3]) == 5


def test_a_frozen_module_and_a_gradient_free_pass_cast_no_votes() -> None:
    layer = TernaryLinear(6, 4)
    layer.frozen = True
    x = torch.randn(3, 6, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert not layer.votes.any()
    layer.frozen = False
    with torch.no_grad():
        assert not layer(x).requires_grad


def test_a_pure_model_learns_although_no_input_requires_grad() -> None:
    model = Model("int8", "float")
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    for module in (model.table, model.norm, model.hidden, model.head):
        assert int(module.votes.abs().sum()) > 0


def test_a_bias_reaches_the_output_and_casts_signs() -> None:
    layer = TernaryLinear(6, 4, bias=True, activations="float")
    assert layer.bias is not None
    assert layer.bias_exponent is not None
    assert layer.bias_votes is not None
    layer.bias += torch.tensor([1, -2, 3, 0])
    layer.bias_exponent.fill_(-3)
    x = torch.randn(3, 6)
    expected = x @ layer.dense_weight().t() + torch.tensor([0.125, -0.25, 0.375, 0.0])
    torch.testing.assert_close(layer(x), expected)
    layer(x).backward(torch.tensor([[1.0, -1.0, 2.0, 0.0]] * 3))
    assert layer.bias_votes.tolist() == [-1, 1, -1, 0]


def test_bad_arguments_are_refused() -> None:
    layer = TernaryLinear(6, 4)
    with pytest.raises(RuntimeError, match="shape"):
        layer(torch.randn(3, 5))
    with pytest.raises(ValueError, match="float tensor"):
        layer(torch.ones(3, 6, dtype=torch.int32))
    with pytest.raises(IndexError, match=r"0\.\.19"):
        TernaryEmbedding(20, 4)(torch.tensor([20]))
    with pytest.raises(ValueError, match="group_size"):
        TernaryLinear(6, 4, group_size=48)
    with pytest.raises(ValueError, match="activations"):
        TernaryLinear(6, 4, activations="int4")
    with pytest.raises(ValueError, match="scale_rule"):
        TernaryLinear(6, 4, scale_rule="correlation")


def test_lookup_leaves_the_check_of_ids_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def embedding(ids: Tensor, weight: Tensor, *_: object) -> Tensor:
        asked.append(ids.device)
        return weight.new_empty((ids.shape[0], 64), dtype=torch.bfloat16)

    monkeypatch.setattr(ops, "kernel", lambda *_: embedding)
    # A tensor of this mode has no values: reading one, for which a host would wait, raises.
    with FakeTensorMode():
        state = TernaryEmbedding(40, 64, backend="torch").vote_state()
        state = state._replace(weight=torch.empty_like(state.weight, device="cuda"))
        ids = torch.zeros(3, dtype=torch.int64, device="cuda")
        rows = ops.embedding.function(ids, None, state, torch.bfloat16, "float")
    assert rows.shape == (3, 64)
    assert asked == [torch.device("cuda", 0)]


def test_lookup_on_the_cpu_says_which_ids_are_outside() -> None:
    state = TernaryEmbedding(40, 64, backend="torch").vote_state()
    with pytest.raises(IndexError, match=r"ids must lie in 0\.\.39, got -1\.\.40"):
        ops.embedding.function(torch.tensor([3, -1, 40]), None, state, torch.bfloat16, "float")
