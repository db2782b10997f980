from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from types import SimpleNamespace as Kit

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import arb_ternary
from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.module import TernaryModule


def absmean(weight: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """The rule that the docstring of ``ternarize`` states: trits and the dense weight."""
    trits = np.zeros_like(weight)
    dense = np.zeros_like(weight)
    for start in range(0, weight.shape[1], group):
        part = weight[:, start : start + group]
        scale = 2.0 ** np.rint(np.log2(np.abs(part).mean(axis=1, keepdims=True)))
        trits[:, start : start + group] = np.clip(np.rint(part / scale), -1, 1)
        dense[:, start : start + group] = trits[:, start : start + group] * scale
    return trits, dense


@pytest.mark.parametrize("group", [32, 64])
def test_absmean_is_the_documented_rule(kit: Kit, group: int) -> None:
    model = kit.new_net()
    before = {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}
    report = arb_ternary.ternarize(model, group_size=group)
    for entry in report.replaced:
        weight = before[f"{entry.name}.weight"]
        matrix = weight.reshape(weight.shape[0], -1)
        trits, dense = absmean(matrix, group)
        layer = model.get_submodule(entry.name)
        assert np.array_equal(layer.ternary.trits().numpy(), trits)
        assert np.array_equal(layer.weight.detach().numpy(), dense.reshape(weight.shape))
        # Accumulators hold what rounding left, in 64ths of a step.
        scale = dense[trits != 0] / trits[trits != 0]
        left = np.rint(64 * (matrix[trits != 0] / scale - trits[trits != 0])).clip(-63, 63)
        assert np.array_equal(layer.ternary.logical_votes().numpy()[trits != 0], left)
        error = np.linalg.norm(matrix - dense) / np.linalg.norm(matrix)
        assert entry.error == pytest.approx(error, rel=1e-5)


def test_report_names_every_matrix(kit: Kit) -> None:
    model = kit.new_net()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.dim() > 1}
    report = arb_ternary.ternarize(model, backend="torch")
    replaced = {f"{each.name}.weight": each.shape for each in report.replaced}
    left = {each.name: each.shape for each in report.left}
    assert replaced | left == shapes
    assert left.keys() == {"lm_head.weight"}
    assert report.left[0].reason == "excluded by 'lm_head'"
    weights = 12 * 48 + 48 * 24 * 3 + 2 * 48 * 96
    assert report.weights == weights
    assert report.bytes_before == 4 * weights
    # Two bits per trit, rows of 24 * 3 and of 48 columns; one exponent per row.
    packed = (12 * 48 + 96 * 48 + 48 * 96 + 48 * 72) // 4
    assert report.bytes_after == packed + 12 + 96 + 48 + 48
    text = str(report)
    for words in ("embed", "Conv1d", "lm_head.weight  12 x 48  excluded by 'lm_head'"):
        assert words in text
    assert f"{weights:,} ternary weights: 32.00 bits each before" in text


def test_bias_and_norms_stay_float_parameters_and_trits_are_none(kit: Kit) -> None:
    model = kit.new_net()
    bias = model.up.bias
    arb_ternary.ternarize(model)
    names = {name for name, _ in model.named_parameters()}
    assert names == {"norm.weight", "norm.bias", "mix.bias", "up.bias", "lm_head.weight"}
    assert model.up.bias is bias


def test_layers_stay_the_same_objects_with_hooks_mode_and_class(kit: Kit) -> None:
    model = kit.new_net().eval()
    layers = {"up": model.up, "embed": model.embed, "mix": model.mix}
    seen = []
    model.up.register_forward_hook(lambda *_: seen.append("forward"))
    model.up.register_forward_pre_hook(lambda *_: seen.append("before"))
    arb_ternary.ternarize(model)
    for name, layer in layers.items():
        assert model.get_submodule(name) is layer
        assert not layer.training
    assert isinstance(model.up, nn.Linear)
    assert isinstance(model.embed, nn.Embedding)
    assert isinstance(model.mix, nn.Conv1d)
    model(torch.zeros(1, 3, dtype=torch.int64))
    assert seen == ["before", "forward"]


def test_include_and_exclude_name_modules_and_patterns(kit: Kit) -> None:
    report = arb_ternary.ternarize(kit.new_net(), include=["*p", "down"])
    assert [each.name for each in report.replaced] == ["up", "down"]
    assert {each.reason for each in report.left} == {"not included"}
    report = arb_ternary.ternarize(kit.new_net(), exclude=["embed", "mix"])
    assert [each.name for each in report.replaced] == ["up", "down", "lm_head"]
    outer = nn.ModuleDict({"body": kit.new_net(), "other": kit.new_net()})
    report = arb_ternary.ternarize(outer, include=["body"])
    assert {each.name.partition(".")[0] for each in report.replaced} == {"body"}
    assert "body.lm_head.weight" in {each.name for each in report.left}


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_name_that_matches_nothing_is_an_error_with_the_nearest(kit: Kit, option: str) -> None:
    model = kit.new_net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UsageProblem) as caught:
        arb_ternary.ternarize(model, **{option: ["dwon"]})
    assert caught.value.what == f"{option}: 'dwon' names no module of the model"
    assert caught.value.hint.startswith("Nearest: down.")
    with pytest.raises(UsageProblem, match=f"{option}: must be a list of names, not the text"):
        arb_ternary.ternarize(model, **{option: "down"})
    assert kit.same(before, model.state_dict())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"init": "gptq"}, "init: gptq fits weights to the inputs of layers, and there is no cal"),
        ({"init": "absmena"}, "did you mean 'absmean'"),
        ({"calibration": [torch.zeros(1)]}, "calibration: init='absmean' does not read it"),
    ],
)
def test_options_that_do_not_go_together_are_refused(kit: Kit, options: dict, words: str) -> None:
    model = kit.new_net()
    with pytest.raises(UsageProblem) as caught:
        arb_ternary.ternarize(model, **options)
    assert words in str(caught.value)
    assert type(model.up) is nn.Linear


@pytest.mark.parametrize("options", [{"group_size": 48}, {"activations": "fp8"}, {"vote_bits": 3}])
def test_options_of_modules_are_checked_before_anything_changes(kit: Kit, options: dict) -> None:
    model = kit.new_net()
    with pytest.raises(ValueError, match=next(iter(options))):
        arb_ternary.ternarize(model, **options)
    assert type(model.embed) is nn.Embedding


def test_a_weight_that_is_not_finite_is_named(kit: Kit) -> None:
    model = kit.new_net()
    model.down.weight.data[0, 0] = torch.nan
    with pytest.raises(UsageProblem, match="down: its weight has elements that are not finite"):
        arb_ternary.ternarize(model)
    assert type(model.embed) is nn.Embedding


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_what_cannot_be_replaced_is_left_with_the_reason() -> None:
    model = nn.ModuleDict(
        {
            "own": Scaled(4, 4),
            "norm": parametrizations.weight_norm(nn.Linear(4, 4)),
            "lazy": nn.LazyLinear(4),
            "hooked": nn.Linear(4, 4),
            "bounded": nn.Embedding(4, 4, max_norm=1.0),
            "lstm": nn.LSTM(4, 4),
            "patched": nn.Linear(4, 4),
            "attention": nn.MultiheadAttention(4, 2),
            "absent": nn.Linear(4, 4, device="meta"),
            "fine": nn.Linear(4, 4),
        }
    )
    model["hooked"].weight.register_hook(lambda gradient: gradient)
    model["patched"].forward = lambda x: x
    report = arb_ternary.ternarize(model)
    assert [each.name for each in report.replaced] == ["attention.out_proj", "fine"]
    reasons = {each.name: each.reason for each in report.left}
    assert reasons == {
        "own.weight": "Scaled has a forward of its own",
        "norm.parametrizations.weight.original0": "the weight of its layer is computed from it by "
        "a parametrization",
        "norm.parametrizations.weight.original1": "the weight of its layer is computed from it by "
        "a parametrization",
        "lazy.weight": "it is a UninitializedParameter",
        "hooked.weight": "it has hooks, which a ternary weight cannot call",
        "bounded.weight": "the embedding has max_norm",
        "lstm.weight_ih_l0": "a parameter of LSTM itself, not of a linear, an embedding or a "
        "convolution",
        "lstm.weight_hh_l0": "a parameter of LSTM itself, not of a linear, an embedding or a "
        "convolution",
        "patched.weight": "the forward of its layer was replaced on the object, as accelerate's "
        "device map does",
        "attention.in_proj_weight": "a parameter of MultiheadAttention itself, not of a linear, an "
        "embedding or a convolution",
        "absent.weight": "it is on the device meta, without values",
    }


def test_a_model_without_layers_is_an_error(kit: Kit) -> None:
    with pytest.raises(UsageProblem, match="nothing in the model can become ternary"):
        arb_ternary.ternarize(nn.Sequential(nn.LayerNorm(4)))
    with pytest.raises(UsageProblem, match="LSTM itself"):
        arb_ternary.ternarize(nn.LSTM(4, 4))


def tied(kit: Kit) -> nn.Module:
    model = kit.new_net(width=32)
    model.lm_head.weight = model.embed.weight
    return model


def test_a_weight_that_an_excluded_layer_shares_is_left(kit: Kit) -> None:
    report = arb_ternary.ternarize(tied(kit))
    assert {each.name: each.reason for each in report.left} == {
        "embed.weight": "it is also lm_head.weight, which is left: excluded by 'lm_head'"
    }


def test_tied_layers_share_one_ternary_weight_and_stay_tied(kit: Kit) -> None:
    model = tied(kit)
    tokens = torch.arange(kit.VOCABULARY).view(1, -1)
    report = arb_ternary.ternarize(model, exclude=(), activations="float")
    assert report.replaced[0].tied == ("lm_head",)
    assert model.embed.ternary is model.lm_head.ternary
    assert "embed = lm_head" in str(report)
    twin = copy.deepcopy(model)
    assert twin.embed.ternary is twin.lm_head.ternary
    arb_ternary.dense(twin)
    assert twin.embed.weight is twin.lm_head.weight
    assert torch.allclose(model(tokens), twin(tokens), atol=1e-6)

    # Both uses cast votes: the float twin's gradient is the sum over them, and so are its signs
    # where both are of one sign.
    optimizer = arb_ternary.make_optimizer(model, "sign_votes")
    before = model.embed.ternary.logical_votes().clone().int()
    kit.loss_of(model, tokens).backward()
    assert model.embed.ternary.casts == 2
    moved = model.embed.ternary.logical_votes().int() - before
    kit.loss_of(twin, tokens).backward()
    gradient = twin.embed.weight.grad
    both = moved.abs() == 2
    assert bool(both.any())
    assert torch.equal(moved[both].sign(), -gradient[both].sign().int())
    optimizer.step()


def test_a_shared_weight_is_saved_once(kit: Kit, tmp_path: Path) -> None:
    model = tied(kit)
    arb_ternary.ternarize(model, exclude=())
    state = model.state_dict()
    assert not any(name.startswith("lm_head") for name in state)
    save_file(state, tmp_path / "model.safetensors")
    twin = tied(kit)
    arb_ternary.ternarize(twin, exclude=(), init="random")
    twin.load_state_dict(load_file(tmp_path / "model.safetensors"))
    tokens = torch.arange(kit.VOCABULARY).view(1, -1)
    assert torch.equal(model(tokens), twin(tokens))
    assert twin.bfloat16()(tokens).dtype == torch.bfloat16
    assert pickle.loads(pickle.dumps(twin)).lm_head.ternary.shape.out_features == kit.VOCABULARY


def test_the_weight_of_a_layer_that_others_read_casts_votes() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(32, 2, batch_first=True)
    arb_ternary.ternarize(attention)
    twin = copy.deepcopy(attention)
    arb_ternary.dense(twin)
    x = torch.randn(2, 5, 32)
    y, _ = attention(x, x, x)
    expected, _ = twin(x, x, x)
    assert torch.allclose(y, expected, atol=1e-6)
    arb_ternary.make_optimizer(attention, "sign_votes")
    ternary = attention.out_proj.ternary
    before = ternary.logical_votes().int()
    attention(x, x, x)[0].square().sum().backward()
    twin(x, x, x)[0].square().sum().backward()
    moved = ternary.logical_votes().int() - before
    gradient = twin.out_proj.weight.grad
    certain = gradient.abs() > 1e-4
    assert torch.equal(moved[certain], -gradient[certain].sign().int())


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(6, 8, 3, stride=2, padding=1, dilation=2),
        nn.Conv2d(8, 12, (3, 2), groups=4, padding_mode="circular", padding=1),
        nn.Conv3d(2, 4, 2),
        nn.ConvTranspose1d(4, 6, 3, stride=2),
        nn.ConvTranspose2d(8, 4, 3, groups=2),
        nn.ConvTranspose3d(2, 4, 2),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_convolutions_of_every_kind_cast_the_votes_of_their_gradient(layer: nn.Module) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(copy.deepcopy(layer))
    arb_ternary.ternarize(model)
    twin = copy.deepcopy(model)
    arb_ternary.dense(twin)
    assert type(twin[0]) is type(layer)
    x = torch.randn(2, layer.in_channels, *(6 for _ in layer.kernel_size))
    assert torch.equal(model(x), twin(x))
    arb_ternary.make_optimizer(model, "sign_votes")
    before = model[0].ternary.logical_votes().int()
    model(x).square().sum().backward()
    twin(x).square().sum().backward()
    gradient = twin[0].weight.grad.flatten(1)
    certain = gradient.abs() > 1e-4
    moved = model[0].ternary.logical_votes().int() - before
    assert torch.equal(moved[certain], -gradient[certain].sign().int())
    assert torch.allclose(model[0].bias.grad, twin[0].bias.grad, rtol=1e-5)


def test_padding_does_not_learn() -> None:
    model = nn.Sequential(nn.Embedding(6, 32, padding_idx=2))
    arb_ternary.ternarize(model)
    twin = copy.deepcopy(model)
    arb_ternary.dense(twin)
    ids = torch.tensor([[1, 2, 2, 5]])
    assert torch.equal(model(ids), twin(ids))
    optimizer = arb_ternary.make_optimizer(model, "sign_votes")
    before = model[0].ternary.logical_votes()
    model(ids).sum().backward()
    changed = (model[0].ternary.logical_votes() != before).any(dim=1)
    assert changed.tolist() == [False, True, False, False, False, True]
    optimizer.step()


def test_dense_gives_the_outputs_of_float_activations(kit: Kit) -> None:
    model = kit.new_net()
    tokens = torch.arange(kit.VOCABULARY).view(1, -1)
    arb_ternary.ternarize(model, activations="float")
    expected = model(tokens)
    names = arb_ternary.dense(model)
    assert names == ("embed", "mix", "up", "down")
    assert [type(each) for each in (model.embed, model.up)] == [nn.Embedding, nn.Linear]
    assert torch.allclose(model(tokens), expected, atol=1e-6)
    assert not any(isinstance(each, TernaryModule) for each in model.modules())
    assert list(model.state_dict()) == list(kit.new_net().state_dict())
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in kit.new_net().named_parameters()
    ]
    with pytest.raises(UsageProblem, match="dense: the model has no layers that ternarize"):
        arb_ternary.dense(model)


def test_int8_activations_move_outputs_by_the_rounding_of_inputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    arb_ternary.ternarize(model)
    x = torch.randn(5, 64)
    y = model(x)
    arb_ternary.dense(model)
    # Inputs are rounded to steps of max|x| / 127 per row: by half a step at most.
    bound = x.abs().amax(dim=1, keepdim=True) / 254 * model[0].weight.abs().sum(dim=1)
    assert bool(((model(x) - y).abs() <= bound * 1.01).all())
    assert not torch.equal(model(x), y)


def test_only_random_draws_from_the_generator_of_torch(kit: Kit) -> None:
    model = kit.new_net()
    before = torch.get_rng_state()
    arb_ternary.ternarize(model)
    assert torch.equal(torch.get_rng_state(), before)
    arb_ternary.ternarize(kit.new_net(), init="random")
    assert not torch.equal(torch.get_rng_state(), before)


def test_random_draws_new_weights(kit: Kit) -> None:
    first = kit.new_net()
    second = kit.new_net()
    report = arb_ternary.ternarize(first, init="random")
    torch.manual_seed(1)
    arb_ternary.ternarize(second, init="random")
    assert {each.error for each in report.replaced} == {None}
    assert not torch.equal(first.up.ternary.trits(), second.up.ternary.trits())
    assert not bool(first.up.ternary.logical_votes().any())


def test_a_frozen_weight_becomes_a_frozen_ternary_weight(kit: Kit) -> None:
    model = kit.new_net()
    model.up.weight.requires_grad_(False)
    arb_ternary.ternarize(model)
    assert model.up.ternary.frozen
    optimizer = arb_ternary.make_optimizer(model)
    assert model.up.ternary not in optimizer.rule.modules
    arb_ternary.dense(model)
    assert not model.up.weight.requires_grad
    assert model.down.weight.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_layers_compute_in_the_dtype_of_the_model(kit: Kit, dtype: torch.dtype) -> None:
    tokens = torch.arange(kit.VOCABULARY).view(1, -1)
    before = kit.new_net().to(dtype)
    arb_ternary.ternarize(before)
    assert before(tokens).dtype == dtype
    after = kit.new_net()
    arb_ternary.ternarize(after)
    kept = kit.integers(after)
    after.to(dtype)
    assert kit.same(kept, kit.integers(after))
    assert after(tokens).dtype == after.embed.weight.dtype == after.mix.weight.dtype == dtype
    assert after.up.bias.dtype == dtype
    arb_ternary.dense(after)
    assert after.up.weight.dtype == dtype


def test_half_keeps_integers_and_type_is_refused(kit: Kit) -> None:
    model = kit.new_net()
    arb_ternary.ternarize(model)
    kept = kit.integers(model)
    model.half()
    assert kit.same(kept, kit.integers(model))
    with pytest.raises(UsageProblem, match="trits and accumulators are integers"):
        model.type(torch.float16)
    assert kit.same(kept, kit.integers(model))


def test_a_ternary_weight_cannot_be_replaced_by_a_tensor(kit: Kit) -> None:
    model = kit.new_net()
    arb_ternary.ternarize(model)
    for value in (nn.Parameter(torch.zeros(96, 48)), torch.zeros(96, 48)):
        with pytest.raises(UsageProblem, match="its weight is ternary and cannot be replaced"):
            model.up.weight = value


def copied(kit: Kit, model: nn.Module, how: str, folder: Path) -> nn.Module:
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    made = kit.new_net(seed=1)
    arb_ternary.ternarize(made, init="random", gradients="int8")
    if how == "torch":
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    else:
        save_file(model.state_dict(), folder / "model.safetensors")
        state = load_file(folder / "model.safetensors")
    made.load_state_dict(state)
    return made


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch", "safetensors"])
def test_copies_and_saved_models_continue_with_the_same_bits(
    kit: Kit, how: str, tmp_path: Path
) -> None:
    tokens = torch.arange(kit.VOCABULARY).view(1, -1)
    model = kit.new_net()
    arb_ternary.ternarize(model, gradients="int8")
    optimizer = arb_ternary.make_optimizer(model, lr=0.5, float_lr=0.1)
    for _ in range(3):
        kit.loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    twin = copied(kit, model, how, tmp_path)
    other = arb_ternary.make_optimizer(twin, lr=0.5, float_lr=0.1)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(3):
        for net, steps in ((model, optimizer), (twin, other)):
            kit.loss_of(net, tokens).backward()
            steps.step()
            steps.zero_grad()
        assert optimizer.last_outcome.flips == other.last_outcome.flips > 0
    assert kit.same(model.state_dict(), twin.state_dict())


def test_weights_that_are_ternary_already_are_taken_as_they_are() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(100, 8, bias=False)
    trits = torch.randint(-1, 2, (8, 100))
    scale = torch.exp2(torch.randint(-9, 3, (8, 4)).float()).repeat_interleave(32, 1)[:, :100]
    weight = trits * scale
    layer.weight.data = weight
    model = nn.ModuleDict({"layer": layer})
    with pytest.raises(UsageProblem, match=r"layer: .* in groups of 32 columns, .* group_size is"):
        arb_ternary.ternarize(model)
    assert layer.weight.data is weight or torch.equal(layer.weight, weight)

    report = arb_ternary.ternarize(model, group_size=32)
    assert (report.replaced[0].init, report.replaced[0].error) == ("exact", 0)
    assert torch.equal(layer.ternary.trits(), trits.to(torch.int8))
    assert torch.equal(layer.weight, weight)
    assert not layer.ternary.logical_votes().any()


def test_ternary_weights_keep_a_common_factor_and_learn_what_different_scales_lack() -> None:
    trits = torch.tensor([[1.0, -1, 0, 1], [0, 1, 1, -1]])
    layer = nn.Linear(4, 2, bias=False)
    layer.weight.data = 0.3 * trits
    arb_ternary.ternarize(nn.Sequential(layer), activations="float")
    x = torch.randn(3, 4)
    assert torch.allclose(layer.weight, 0.3 * trits, rtol=1e-6)
    assert torch.allclose(layer(x), x @ (0.3 * trits).T, rtol=1e-5, atol=1e-6)
    arb_ternary.dense(nn.Sequential(layer))
    assert torch.allclose(layer.weight, 0.3 * trits, rtol=1e-6)

    # Rows of 0.3 and 0.55: the powers are 1/4 and 1/2, and 0.3 / 0.25 - 1 is 0.2 of 64 quanta.
    layer.weight.data = torch.tensor([[0.3], [0.55]]) * trits
    arb_ternary.ternarize(nn.Sequential(layer))
    assert torch.equal(layer.weight, torch.tensor([[0.25], [0.5]]) * trits)
    expected = (torch.tensor([[0.2], [0.1]]) * 64 * trits).round()
    assert torch.equal(layer.ternary.logical_votes().float(), expected)
