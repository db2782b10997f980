"""Test SignGSD on float parameters against a restatement of its rule in numpy."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn

from arb_ternary.errors import ConfigError
from arb_ternary.optim.protocol import StepOutcome
from arb_ternary_signgsd import NanGradientError, ScaledOptum, SignGSD


def expected_step(
    p: np.ndarray, g: np.ndarray, lr: float, weight_decay: float = 0.0, maximize: bool = False
) -> np.ndarray:
    """Return the rule in numpy; every operation is rounded once, to the dtype of ``p``."""
    real = p.dtype.type
    direction = -np.sign(g) if maximize else np.sign(g)
    update = direction + real(weight_decay) * np.sign(p)
    return p - real(lr) * update


def parameter(
    values: np.ndarray | list[float], gradient: np.ndarray | list[float] | None
) -> nn.Parameter:
    made = nn.Parameter(torch.from_numpy(np.array(values, dtype=np.asarray(values).dtype)))
    if gradient is not None:
        made.grad = torch.from_numpy(np.array(gradient, dtype=made.detach().numpy().dtype))
    return made


def float32_arrays(
    shape: tuple[int, ...] | st.SearchStrategy[tuple[int, ...]],
) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(
        np.float32,
        shape,
        elements=st.floats(-1e6, 1e6, width=32) | st.sampled_from([0.0, -0.0, 1e-40]),
    )


@given(data=st.data())
def test_a_step_equals_the_rule_in_numpy_bit_for_bit(data: st.DataObject) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=3, max_side=6))
    dtype = data.draw(st.sampled_from([np.float32, np.float64]))
    p = data.draw(float32_arrays(shape)).astype(dtype)
    g = data.draw(float32_arrays(shape)).astype(dtype)
    lr = data.draw(st.floats(0, 10))
    weight_decay = data.draw(st.sampled_from([0.0, 0.1, 1.0, 3.7]))
    maximize = data.draw(st.booleans())
    foreach = data.draw(st.booleans())
    weight = parameter(p, g)
    SignGSD([weight], lr, weight_decay, maximize=maximize, foreach=foreach).step()
    np.testing.assert_array_equal(
        weight.detach().numpy(), expected_step(p, g, lr, weight_decay, maximize)
    )


def test_defaults_are_lr_one_hundredth_without_decay() -> None:
    weight = parameter(np.float32([1.0, -1.0, 0.5, 2.0]), [3.0, -1e-9, 0.0, 0.25])
    SignGSD([weight]).step()
    lr = np.float32(0.01)
    np.testing.assert_array_equal(
        weight.detach().numpy(),
        np.float32([np.float32(1) - lr, lr - np.float32(1), 0.5, np.float32(2) - lr]),
    )


def test_decay_adds_the_sign_of_the_parameter() -> None:
    weight = parameter(np.float64([1.0, 1.0, -1.0, 0.0, 100.0]), [2.0, -2.0, -5.0, 1.0, 0.0])
    SignGSD([weight], lr=0.5, weight_decay=1.0).step()
    np.testing.assert_array_equal(weight.detach().numpy(), [0.0, 1.0, 0.0, -0.5, 99.5])


def test_only_the_direction_of_the_gradient_counts() -> None:
    first = parameter(np.float32([0.3, -0.7, 0.1]), [1e-30, -2.0, 0.0])
    second = parameter(np.float32([0.3, -0.7, 0.1]), [1e30, -1e-3, 0.0])
    SignGSD([first]).step()
    SignGSD([second]).step()
    assert torch.equal(first, second)


def test_maximize_climbs_and_still_decays_towards_zero() -> None:
    weight = parameter(np.float64([1.0]), [4.0])
    SignGSD([weight], lr=0.25, maximize=True).step()
    assert weight.item() == 1.25
    weight.grad.zero_()
    SignGSD([weight], lr=0.25, weight_decay=1.0, maximize=True).step()
    assert weight.item() == 1.0


def test_there_is_no_optimizer_state_after_any_number_of_steps() -> None:
    weight = parameter(np.ones(5, np.float32), np.ones(5, np.float32))
    optimizer = SignGSD([weight], weight_decay=0.5)
    for _ in range(3):
        optimizer.step()
    assert len(optimizer.state) == 0
    assert optimizer.state_dict()["state"] == {}


def test_parameter_without_a_gradient_does_not_decay() -> None:
    weight = parameter(np.ones(3, np.float32), None)
    SignGSD([weight], weight_decay=1.0).step()
    assert weight.tolist() == [1.0, 1.0, 1.0]


def test_the_gradient_itself_is_not_changed() -> None:
    weight = parameter(np.ones(3, np.float32), [1.5, -2.5, float("nan")])
    SignGSD([weight], weight_decay=1.0, nan_policy="zero", maximize=True).step()
    np.testing.assert_array_equal(weight.grad.numpy(), np.float32([1.5, -2.5, np.nan]))


def test_closure_runs_with_gradients_and_its_loss_is_returned() -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    optimizer = SignGSD([weight], lr=0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert loss.item() == 4.0
    assert weight.item() == 1.5
    assert optimizer.step() == StepOutcome(stepped=True)


def test_groups_have_their_own_learning_rate_decay_and_direction() -> None:
    slow = parameter(np.float64([1.0]), [1.0])
    fast = parameter(np.float64([1.0]), [1.0])
    SignGSD(
        [
            {"params": [slow], "lr": 0.125},
            {"params": [fast], "weight_decay": 1.0, "maximize": True},
        ],
        lr=0.5,
    ).step()
    assert slow.item() == 0.875
    assert fast.item() == 1.0


def test_a_learning_rate_schedule_sets_the_size_of_each_step() -> None:
    weight = parameter(np.float64([0.0]), [-1.0])
    optimizer = SignGSD([weight], lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    for _ in range(4):
        optimizer.step()
        schedule.step()
    assert weight.item() == 1.0 + 0.5 + 0.25 + 0.125


def test_foreach_update_is_bitwise_the_single_one() -> None:
    generator = torch.Generator().manual_seed(3)
    kinds = [
        (torch.float32, 17),
        (torch.float64, 5),
        (torch.bfloat16, 33),
        (torch.float32, 1),
        (torch.float16, 9),
    ]
    made = []
    for _ in range(2):
        generator.manual_seed(3)
        weights = [
            nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for dtype, n in kinds
        ]
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        weights[0].grad[3] = float("nan")
        made.append(weights)
    for foreach, weights in zip((False, True), made, strict=True):
        optimizer = SignGSD(weights, 0.0371, 0.19, foreach=foreach, nan_policy="zero")
        for _ in range(5):
            optimizer.step()
    for one, together in zip(*made, strict=True):
        assert one.dtype == together.dtype
        assert torch.equal(one, together)


# --- sparse gradients


@given(
    rows=st.lists(st.integers(0, 6), max_size=9),
    weight_decay=st.sampled_from([0.0, 0.3]),
    maximize=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_sparse_gradient_gives_the_bits_of_the_dense_rule(
    rows: list[int], weight_decay: float, maximize: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    p = rng.integers(-2, 3, (7, 3)).astype(np.float32) * np.float32(0.3)
    values = rng.integers(-1, 2, (len(rows), 3)).astype(np.float32)
    g = np.zeros_like(p)
    np.add.at(g, np.array(rows, dtype=int), values)
    weight = parameter(p, None)
    indices = torch.tensor([rows], dtype=torch.int64)
    weight.grad = torch.sparse_coo_tensor(
        indices, torch.from_numpy(values), (7, 3), check_invariants=True
    )
    SignGSD([weight], 0.07, weight_decay, maximize=maximize).step()
    np.testing.assert_array_equal(
        weight.detach().numpy(), expected_step(p, g, 0.07, weight_decay, maximize)
    )


def test_sparse_embedding_trains_like_a_dense_one() -> None:
    ids = torch.tensor([1, 1, 4, 0, 4])
    tables = []
    for sparse in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(6, 2, sparse=sparse)
        optimizer = SignGSD(table.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            (table(ids) ** 2).sum().backward()
            optimizer.step()
        tables.append(table.weight.detach())
    assert torch.equal(tables[0], tables[1])


def test_duplicate_rows_are_summed_before_the_sign() -> None:
    weight = parameter(np.zeros((2, 1), np.float32), None)
    weight.grad = torch.sparse_coo_tensor(
        [[0, 0, 0]], [[5.0], [-1.0], [-1.0]], (2, 1), check_invariants=True
    )
    SignGSD([weight], lr=1.0).step()
    assert weight.tolist() == [[-1.0], [0.0]]


# --- NaN


def test_nan_gradient_is_an_error_that_names_the_parameter() -> None:
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "second": nn.Linear(2, 3)})
    groups = [
        {"params": list(model["first"].named_parameters(prefix="first"))},
        {"params": list(model["second"].named_parameters(prefix="second"))},
    ]
    optimizer = SignGSD(groups)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    model["second"].bias.grad[1] = float("nan")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NanGradientError) as caught:
        optimizer.step()
    assert caught.value.what == (
        "SignGSD: param group 1, parameter 1 ('second.bias'), shape (3,): the gradient holds 1 NaN "
        "of 3 values; no parameter was changed"
    )
    assert "skip" in caught.value.hint
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_error_without_names_gives_group_and_parameter() -> None:
    weight = parameter(np.ones(2, np.float32), [float("nan"), float("nan")])
    with pytest.raises(
        NanGradientError,
        match=r"param group 0, parameter 0, shape \(2,\): the gradient holds 2 NaN",
    ):
        SignGSD([weight]).step()


def test_a_nan_in_a_sparse_gradient_is_found() -> None:
    weight = parameter(np.ones((4, 2), np.float32), None)
    weight.grad = torch.sparse_coo_tensor(
        [[2]], [[1.0, float("nan")]], (4, 2), check_invariants=True
    )
    with pytest.raises(NanGradientError, match="1 NaN of 2 values"):
        SignGSD([weight]).step()
    SignGSD([weight], lr=0.5, nan_policy="zero").step()
    assert weight.tolist() == [[1, 1], [1, 1], [0.5, 1], [1, 1]]


def test_policy_zero_treats_nan_as_a_gradient_of_zero() -> None:
    weight = parameter(np.float64([1.0, 1.0, -1.0]), [float("nan"), 1.0, float("nan")])
    SignGSD([weight], lr=0.25, nan_policy="zero").step()
    assert weight.tolist() == [1.0, 0.75, -1.0]
    SignGSD([weight], lr=0.25, weight_decay=1.0, nan_policy="zero").step()
    assert weight.tolist() == [0.75, 0.25, -0.75]


def test_policy_skip_drops_the_step_of_every_group_and_counts_it() -> None:
    bad = parameter(np.ones(2, np.float32), [float("nan"), 1.0])
    good = parameter(np.ones(2, np.float32), [1.0, 1.0])
    optimizer = SignGSD([{"params": [bad]}, {"params": [good]}], nan_policy="skip")
    assert optimizer.step() == StepOutcome(stepped=False, skipped=True)
    assert bad.tolist() == good.tolist() == [1.0, 1.0]
    assert optimizer.skipped_steps == 1
    assert bad.grad is None, "a poisoned gradient was left for the next backward to add to"
    good.grad = torch.ones(2)
    assert optimizer.step().stepped
    assert optimizer.skipped_steps == 1
    assert good.tolist() != [1.0, 1.0]


def test_policy_error_wins_over_skip() -> None:
    skips, raises = (parameter(np.ones(1, np.float32), [float("nan")]) for _ in range(2))
    optimizer = SignGSD([{"params": [skips], "nan_policy": "skip"}, {"params": [raises]}])
    with pytest.raises(NanGradientError, match="param group 1"):
        optimizer.step()
    assert optimizer.skipped_steps == 0


def test_an_infinite_gradient_has_a_sign_and_is_used() -> None:
    weight = parameter(np.float64([1.0, 1.0, 1.0]), [float("inf"), float("-inf"), 0.0])
    SignGSD([weight], lr=0.5).step()
    assert weight.tolist() == [0.5, 1.5, 1.0]


# --- arguments, state, memory


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "SignGSD: lr must be a finite number >= 0, not -0.1"),
        ({"lr": float("nan")}, "SignGSD: lr must be a finite number >= 0, not nan"),
        ({"lr": float("inf")}, "SignGSD: lr must be a finite number >= 0, not inf"),
        ({"lr": "0.1"}, "SignGSD: lr must be a finite number >= 0, not '0.1'"),
        ({"lr": True}, "SignGSD: lr must be a finite number >= 0, not True"),
        ({"weight_decay": -1}, "SignGSD: weight_decay must be a finite number >= 0, not -1"),
        (
            {"weight_decay": float("nan")},
            "SignGSD: weight_decay must be a finite number >= 0, not nan",
        ),
        ({"maximize": 1}, "SignGSD: maximize must be true or false, not 1"),
        ({"foreach": "yes"}, "SignGSD: foreach must be true, false or None, not 'yes'"),
        (
            {"nan_policy": "skips"},
            "SignGSD: nan_policy must be one of 'error', 'zero', 'skip', not 'skips'",
        ),
    ],
)
def test_an_argument_outside_its_range_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SignGSD([nn.Parameter(torch.ones(1))], **options)
    assert caught.value.what == message


def test_a_misspelt_policy_gets_the_nearest_one() -> None:
    with pytest.raises(ConfigError) as caught:
        SignGSD([nn.Parameter(torch.ones(1))], nan_policy="eror")
    assert caught.value.hint == "did you mean 'error'?"


def test_group_with_a_bad_option_is_not_added() -> None:
    optimizer = SignGSD([nn.Parameter(torch.ones(1))])
    with pytest.raises(ConfigError, match="param group 1: lr must be"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": -1})
    with pytest.raises(ConfigError, match=r"param group 1, parameter 0: dtype torch.complex64"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 1


def test_memory_counts_the_parameters_and_nothing_else() -> None:
    weights = [
        nn.Parameter(torch.zeros(256, 1024)),
        nn.Parameter(torch.zeros(1024, 1024, dtype=torch.bfloat16)),
    ]
    optimizer = SignGSD(weights)
    assert optimizer.get_memory_mb() == 1.0 + 2.0
    assert optimizer.get_memory_mb(weights[:1]) == 1.0
    assert optimizer.get_memory_mb(iter(weights[1:])) == 2.0
    assert optimizer.get_memory_mb([]) == 0.0


def test_a_pickled_optimizer_continues_as_the_original() -> None:
    weight = parameter(np.float32([0.4, -0.2]), [1.0, -3.0])
    optimizer = SignGSD(
        [weight], lr=0.1, weight_decay=0.3, maximize=True, foreach=True, nan_policy="zero"
    )
    twin = pickle.loads(pickle.dumps(optimizer))
    twin_weight = twin.param_groups[0]["params"][0]
    twin_weight.grad = weight.grad.clone()
    optimizer.step()
    twin.step()
    assert torch.equal(weight, twin_weight)
    assert not torch.equal(weight, torch.tensor([0.4, -0.2]))


def test_a_loaded_state_dict_restores_the_options_of_every_group() -> None:
    source = SignGSD(
        [parameter(np.float32([1.0]), None)],
        lr=0.25,
        weight_decay=0.5,
        nan_policy="skip",
        maximize=True,
    )
    weight = parameter(np.float32([1.0]), [1.0])
    target = SignGSD([weight])
    target.load_state_dict(source.state_dict())
    target.step()
    assert weight.item() == 1.0 + 0.25 - 0.25 * 0.5
    assert target.param_groups[0]["nan_policy"] == "skip"


def test_it_minimises_a_sum_of_squares() -> None:
    weight = nn.Parameter(torch.tensor([0.93, -0.42, 0.07]))
    optimizer = SignGSD([weight], lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        (weight**2).sum().backward()
        optimizer.step()
    # Steps of constant size end in a band of one step around the minimum.
    assert weight.abs().max().item() <= 0.01 + 1e-6


def test_the_hook_module_imports_no_torch() -> None:
    code = "import sys, arb_ternary_signgsd.plugin; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_restored_optimizer_has_the_groups_of_an_unsaved_one() -> None:
    parameter = torch.zeros(2, requires_grad=True)
    optimizer = SignGSD([parameter])
    restored = SignGSD([parameter])
    restored.load_state_dict(optimizer.state_dict())
    assert restored.state_dict() == optimizer.state_dict()


def test_the_name_of_the_source_document_is_the_same_optimizer() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    parameter.grad = torch.tensor([3.0, 0.5])
    ScaledOptum([parameter], lr=0.5, weight_decay=0.5).step()
    assert parameter.tolist() == [1.0 - 0.5 * 1.5, -2.0 - 0.5 * 0.5]
