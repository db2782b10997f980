"""Cross entropy in blocks of rows gives the loss and gradients of whole logits."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from arb_ternary.ternary.embedding import TernaryEmbedding
from arb_ternary.ternary.linear import TernaryLinear
from arb_ternary_text.models import blocked_loss, transformer
from arb_ternary_text.models.blocked_loss import Guide, cross_entropies, mean_cross_entropy, serves
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_text.models.parts import FloatLinear, TiedHead
from arb_ternary_train.exact_arithmetic import exact_arithmetic

WIDTH = 64
IDS = 300
ROWS = 200
HEADS: dict[str, Callable[[], nn.Module]] = {
    "float": lambda: FloatLinear(WIDTH, IDS),
    "float, int8 activations": lambda: FloatLinear(WIDTH, IDS, activations="int8"),
    "tied to a float table": lambda: TiedHead(nn.Embedding(IDS, WIDTH), "int8"),
    "ternary": lambda: TernaryLinear(WIDTH, IDS),
    "ternary, int8 gradients": lambda: TernaryLinear(WIDTH, IDS, gradients="int8"),
    "ternary, with a bias": lambda: TernaryLinear(WIDTH, IDS, bias=True),
    "ternary, float activations": lambda: TernaryLinear(WIDTH, IDS, activations="float"),
    "tied to a ternary table": lambda: TiedHead(TernaryEmbedding(IDS, WIDTH), "int8"),
}


class Largest(TorchDispatchMode):
    """Records the largest number of elements of a float tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.is_floating_point():
                self.elements = max(self.elements, each.numel())
        return out


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_loss, "_BLOCK_LOGITS", 1)
    monkeypatch.setattr(blocked_loss, "_FEWEST_ROWS", 48)
    monkeypatch.setattr(blocked_loss, "_FEWEST_ROWS_FLOAT", 48)
    monkeypatch.setattr(blocked_loss, "_CACHED_LOGITS", 7 * IDS)


def learner(head: nn.Module) -> nn.Module:
    return head._embedding[0] if isinstance(head, TiedHead) else head


def pair(kind: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    head = HEADS[kind]()
    twin = copy.deepcopy(head)
    if isinstance(head, TiedHead) and isinstance(twin, TiedHead):
        twin._embedding = (copy.deepcopy(head._embedding[0]),)
    return head, twin


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, WIDTH, generator=generator).to(dtype)
    return x, torch.randint(0, IDS, (ROWS,), generator=generator)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("share", [1.0, 1 / 3])
def test_loss_and_gradients_are_those_of_whole_logits(kind: str, share: float) -> None:
    head, twin = pair(kind)
    x, targets = inputs()
    x_whole = x.clone().requires_grad_()
    x_blocks = x.clone().requires_grad_()
    whole = F.cross_entropy(0.5 * head(x_whole), targets)
    blocks = mean_cross_entropy(twin, x_blocks, targets, logit_scale=0.5)
    # Sums of 300 and of 200 numbers of about 1 in float32.
    assert blocks.item() == pytest.approx(whole.item(), rel=1e-5)
    (whole * share).backward()
    (blocks * share).backward()
    assert x_whole.grad is not None
    assert x_blocks.grad is not None
    assert (x_whole.grad - x_blocks.grad).norm() < 1e-5 * x_whole.grad.norm()
    for one, other in zip(learner(head).parameters(), learner(twin).parameters(), strict=True):
        if one.grad is not None:
            assert other.grad is not None
            assert (one.grad - other.grad).norm() < 1e-5 * one.grad.norm()
    votes = [
        (module.logical_votes(), again.logical_votes())
        for module, again in [(learner(head), learner(twin))]
        if isinstance(module, TernaryLinear | TernaryEmbedding)
        and isinstance(again, TernaryLinear | TernaryEmbedding)
    ]
    for cast, cast_again in votes:
        assert cast.any()
        # A gradient next to 0 may have either sign.
        assert (cast != cast_again).float().mean() < 0.01


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("kind", ["float", "ternary, int8 gradients"])
def test_a_guide_adds_the_weighted_divergence(kind: str, temperature: float) -> None:
    head, twin = pair(kind)
    x, targets = inputs()
    theirs = 3 * torch.randn(ROWS, IDS, generator=torch.Generator().manual_seed(9))
    guide = Guide(lambda rows: theirs[rows], weight=0.7, temperature=temperature)
    x_whole = x.clone().requires_grad_()
    x_blocks = x.clone().requires_grad_()
    logits = 0.5 * head(x_whole)
    drawn = F.log_softmax(logits.double() / temperature, -1)
    aim = F.softmax(theirs.double() / temperature, -1)
    whole = F.cross_entropy(logits, targets) + 0.7 * temperature**2 * F.kl_div(
        drawn, aim, reduction="batchmean"
    )
    blocks = mean_cross_entropy(twin, x_blocks, targets, 0.5, guide)
    assert blocks.item() == pytest.approx(whole.item(), rel=1e-5)
    whole.backward()
    blocks.backward()
    assert x_whole.grad is not None
    assert x_blocks.grad is not None
    # int8 gradients are rounded at random, with a scale per row.
    assert (x_whole.grad - x_blocks.grad).norm() < (
        1e-5 if kind == "float" else 1e-3
    ) * x_whole.grad.norm()
    for one, other in zip(head.parameters(), twin.parameters(), strict=True):
        if one.grad is not None:
            assert other.grad is not None
            assert (one.grad - other.grad).norm() < 1e-5 * one.grad.norm()


def test_frozen_bfloat16_head_holds_one_block_of_gradients() -> None:
    head = FloatLinear(WIDTH, IDS).to(torch.bfloat16).requires_grad_(False)
    x, targets = inputs(torch.bfloat16)
    x_whole = x.float().requires_grad_()
    x_blocks = x.clone().requires_grad_()
    F.cross_entropy(F.linear(x_whole, head.weight.float()), targets).backward()
    with Largest() as largest:
        mean_cross_entropy(head, x_blocks, targets).backward()
    assert largest.elements <= max(48 * IDS, WIDTH * IDS) < ROWS * IDS
    assert x_whole.grad is not None
    assert x_blocks.grad is not None
    # Logits and their gradients have 8 bits.
    assert (x_whole.grad - x_blocks.grad.float()).norm() < 2**-5 * x_whole.grad.norm()


def test_a_bias_gets_votes() -> None:
    head, twin = pair("ternary, with a bias")
    assert isinstance(head, TernaryLinear)
    assert isinstance(twin, TernaryLinear)
    x, targets = inputs()
    F.cross_entropy(head(x), targets).backward()
    mean_cross_entropy(twin, x, targets).backward()
    assert head.bias_votes is not None
    assert twin.bias_votes is not None
    assert head.bias_votes.any()
    assert torch.equal(head.bias_votes, twin.bias_votes)


@pytest.mark.parametrize("kind", HEADS)
def test_losses_of_rows_without_gradients(kind: str) -> None:
    head, _ = pair(kind)
    x, targets = inputs()
    found = cross_entropies(head, x, targets, logit_scale=2.0)
    wanted = -(2 * head(x).detach().double()).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    assert not found.requires_grad
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["float", "ternary, int8 gradients"])
def test_bfloat16_gradients_are_those_of_float32_rounded(kind: str) -> None:
    head, twin = pair(kind)
    x, targets = inputs(torch.bfloat16)
    if isinstance(twin, FloatLinear):
        twin.to(torch.bfloat16)
    x_whole = x.float().requires_grad_()
    x_blocks = x.clone().requires_grad_()
    F.cross_entropy(head(x_whole), targets).backward()
    loss = mean_cross_entropy(twin, x_blocks, targets)
    loss.backward()
    assert loss.dtype is torch.float32
    assert x_whole.grad is not None
    assert x_blocks.grad is not None
    # Logits and their gradients have 8 bits.
    assert (x_whole.grad - x_blocks.grad.float()).norm() < 2**-5 * x_whole.grad.norm()


def test_only_one_block_of_logits_is_held() -> None:
    x, targets = inputs()
    # Its weight has fewer elements than the logits.
    for passes in (
        lambda: mean_cross_entropy(FloatLinear(WIDTH, IDS), x.requires_grad_(), targets).backward(),
        lambda: cross_entropies(TernaryLinear(WIDTH, IDS), x, targets),
    ):
        with Largest() as largest:
            passes()
        assert largest.elements <= max(48 * IDS, WIDTH * IDS) < ROWS * IDS


def test_losses_and_gradient_of_known_logits() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [0.0, 0.0]])
    loss = blocked_loss._Loss(torch.tensor([0, 1]), logit_scale=1.0, guide=None)
    gradients = torch.empty(2, 2)
    losses = loss.losses_and_gradient(logits, slice(0, 2), gradients)
    torch.testing.assert_close(losses, torch.tensor([math.log(4.0), math.log(2.0)]))
    torch.testing.assert_close(gradients, torch.tensor([[-0.375, 0.375], [0.25, -0.25]]))


def test_a_second_backward_is_refused() -> None:
    head, _ = pair("float")
    x, targets = inputs()
    loss = mean_cross_entropy(head, x.requires_grad_(), targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute it again"):
        loss.backward()


@pytest.mark.parametrize("target", [-1, IDS])
def test_an_invalid_target_is_refused(target: int) -> None:
    head, _ = pair("float")
    x, targets = inputs()
    targets[7] = target
    with pytest.raises(IndexError, match=rf"0\.\.{IDS - 1}"):
        mean_cross_entropy(head, x, targets)


def test_changed_or_watched_heads_are_not_served() -> None:
    class Other(TernaryLinear):
        pass

    assert all(serves(pair(kind)[0]) for kind in HEADS)
    watched = FloatLinear(WIDTH, IDS)
    watched.register_forward_hook(lambda *_: None)
    for head in (
        Other(WIDTH, IDS),
        watched,
        FloatLinear(WIDTH, IDS).to(torch.float16),
        nn.Linear(WIDTH, IDS),
    ):
        assert not serves(head)


CONFIG = DecoderConfig(width=32, layers=1, heads=2, max_length=16)


def test_a_decoder_with_many_logits_computes_loss_in_blocks() -> None:
    model = Decoder(CONFIG, 100)
    enough = -(-transformer.MANY_LOGITS // 100)
    assert model.computes_loss_in_blocks(enough)
    assert not model.computes_loss_in_blocks(enough - 1)
    with exact_arithmetic():
        assert not model.computes_loss_in_blocks(enough)


def test_a_model_with_another_forward_uses_whole_logits() -> None:
    class Doubled(Decoder):
        def forward(self, *arguments: Any) -> Tensor:
            return 2 * super().forward(*arguments)

    class Moved(Decoder):
        def logits(self, x_BSD: Tensor) -> Tensor:
            return super().logits(x_BSD) + 1

    watched = Decoder(CONFIG, 100)
    watched.register_forward_hook(lambda *_: None)
    half = Decoder(CONFIG, 100)
    half.set_dtype(torch.float16)
    for model in (Doubled(CONFIG, 100), Moved(CONFIG, 100), watched, half):
        assert not model.computes_loss_in_blocks(1 << 30)


def test_logits_and_losses_follow_from_the_hidden_state() -> None:
    model = Decoder(CONFIG, 100)
    ids = torch.arange(16).view(2, 8)
    assert torch.equal(model.logits(model.hidden(ids)), model(ids))
    losses = model.cross_entropies(model.hidden(ids).flatten(0, 1), ids.flatten())
    wanted = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="none")
    torch.testing.assert_close(losses, wanted)
    mean = model.mean_cross_entropy(model.hidden(ids).flatten(0, 1), ids.flatten())
    torch.testing.assert_close(mean, wanted.mean())
