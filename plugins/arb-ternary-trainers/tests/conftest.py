"""A small model with every kind of layer, and a text that a bigram predicts."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

VOCABULARY = 12


class Net(nn.Module):
    """An embedding, linears, a convolution, norms and dropout over tokens ``[B, L]``."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Conv1d(width, width, 3, padding=1, groups=2)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return self.lm_head(x)

    def mixed(self, tokens: Tensor) -> Tensor:
        """Return the logits with the convolution, which sees later tokens."""
        x = self.embed(tokens)
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return self.lm_head(x)


def new_net(seed: int = 0, **options: int) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


class Bigram:
    """Text in which the next token is one of two, and the entropy that a bigram reaches."""

    #: Probability of the likelier token.
    share = 0.8
    entropy = -(0.8 * math.log(0.8) + 0.2 * math.log(0.2))

    def batch(self, seed: int, rows: int = 16, length: int = 17) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        tokens = [torch.randint(0, VOCABULARY, (rows,), generator=generator)]
        for _ in range(length - 1):
            likely = torch.rand(rows, generator=generator) < self.share
            last = tokens[-1]
            # 5 x + 3 and x + 6 differ for every x modulo 12.
            tokens.append(torch.where(likely, 5 * last + 3, last + 6) % VOCABULARY)
        return torch.stack(tokens, dim=1)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def integers(model: nn.Module) -> dict[str, Tensor]:
    """Return what ternary weights consist of: everything in the state dict that is no float."""
    return {
        name: tensor.clone()
        for name, tensor in model.state_dict().items()
        if not tensor.is_floating_point()
    }


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """What the tests of this folder share."""
    return SimpleNamespace(
        Bigram=Bigram,
        VOCABULARY=VOCABULARY,
        integers=integers,
        loss_of=loss_of,
        new_net=new_net,
        same=same,
    )
