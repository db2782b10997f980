"""Parts of models of images against torch's own, and rotary positions against their closed form."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from arb_ternary_text.models.config import FLOAT_PARTS, DecoderConfig
from arb_ternary_text.models.parts import make_linear
from arb_ternary_text.models.rotary import rotate
from arb_ternary_vision.convolution import TernaryConv2d
from arb_ternary_vision.models.parts import FloatConv2d, make_channel_norm, make_conv
from arb_ternary_vision.models.patch_embedding import Patches
from arb_ternary_vision.models.positions import grid_positions
from arb_ternary_vision.patches import Window


def options(**changed: Any) -> DecoderConfig:
    return DecoderConfig(**{"width": 16, "heads": 2, "causal": False, "group_size": 32, **changed})


FLOAT = options(float_parts=FLOAT_PARTS, activations="float", group_size=128)
WINDOWS = [
    Window((3, 3), padding=(1, 1)),
    Window((3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
    Window((1, 1), stride=(2, 2)),
]


@pytest.mark.parametrize("window", WINDOWS)
def test_float_convolution_matches_torch(window: Window) -> None:
    torch.manual_seed(0)
    ours = FloatConv2d(3, 5, window)
    theirs = nn.Conv2d(3, 5, bias=False, **window._asdict())
    with torch.no_grad():
        theirs.weight.copy_(ours.weight.view_as(theirs.weight))
    x = torch.randn(2, 3, 9, 8, requires_grad=True)
    y = ours(x)
    torch.testing.assert_close(y, theirs(x), atol=1e-5, rtol=1e-5)
    y.square().sum().backward()
    found = x.grad
    x.grad = None
    theirs(x).square().sum().backward()
    torch.testing.assert_close(found, x.grad, atol=1e-4, rtol=1e-4)
    assert ours.weight.grad is not None
    assert theirs.weight.grad is not None
    torch.testing.assert_close(
        ours.weight.grad.view_as(theirs.weight), theirs.weight.grad, atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("activations", ["int8", "float"])
def test_float_and_ternary_convolution_agree(activations: Any) -> None:
    torch.manual_seed(0)
    ternary = make_conv(options(activations=activations), 3, 5, 3, stride=2, padding=1)
    assert isinstance(ternary, TernaryConv2d)
    floating = FloatConv2d(3, 5, Window((3, 3), (2, 2), (1, 1)), activations=activations)
    with torch.no_grad():
        floating.weight.copy_(ternary.dense_weight())
    x = torch.randn(2, 3, 8, 6)
    torch.testing.assert_close(floating(x), ternary(x), atol=1e-5, rtol=1e-5)


def test_float_parts_choose_the_convolution() -> None:
    config = options(float_parts=("head",))
    head = make_conv(config, 1, 2, 3, stride=2, padding=1, part="head")
    assert isinstance(head, FloatConv2d)
    assert head.window == Window((3, 3), (2, 2), (1, 1))
    assert isinstance(make_conv(config, 1, 2, 3), TernaryConv2d)


def test_patches_match_a_convolution() -> None:
    torch.manual_seed(0)
    linear = make_linear(FLOAT, 24, 16, part="embedding")
    patches = Patches(linear, (2, 4))
    x = torch.randn(2, 3, 6, 8)
    y_BDHW = F.conv2d(x, linear.weight.view(16, 3, 2, 4), stride=(2, 4))
    expected = y_BDHW.flatten(2).transpose(1, 2)
    torch.testing.assert_close(patches(x), expected, atol=1e-5, rtol=1e-5)
    assert patches(x).shape == (2, 6, 16)


@pytest.mark.parametrize("changed", [{}, {"learned_norms": True}])
def test_channel_norm_normalises_each_pixel(changed: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 3, 4)
    expected = x / (x.square().mean(dim=1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(
        make_channel_norm(options(**changed), 6)(x), expected, atol=1e-5, rtol=1e-5
    )


def test_grid_positions_rotate_by_row_and_column() -> None:
    # Heads of 8 features have 4 planes: 2 for the row and 2 for the column.
    config = options(rotary_base=100.0)
    positions = grid_positions(config, (2, 3))
    speeds = (1.0, 100.0 ** (-2 / 4))
    expected = [
        [row * speeds[0], row * speeds[1], column * speeds[0], column * speeds[1]]
        for row in range(2)
        for column in range(3)
    ]
    torch.testing.assert_close(
        positions.cos, torch.tensor(expected, dtype=torch.float64).cos().float()
    )
    torch.testing.assert_close(
        positions.sin, torch.tensor(expected, dtype=torch.float64).sin().float()
    )
    assert positions.mask is None
    assert not positions.is_causal


def test_scores_depend_on_the_distance_of_patches_only() -> None:
    torch.manual_seed(0)
    rows = 5
    columns = 4
    positions = grid_positions(options(rotary_base=30.0), (rows, columns), dtype=torch.float64)
    query, key = torch.randn(2, 8, dtype=torch.float64)
    turned = [
        rotate(x.expand(1, 1, rows * columns, 8), positions.cos, positions.sin)[0, 0]
        for x in (query, key)
    ]
    score = (turned[0] @ turned[1].T).view(rows, columns, rows, columns)
    for down, across in ((0, 0), (1, 2), (-2, 1)):
        # Closed form: each plane rotates the product of its two features by speed times distance.
        q, k = (torch.complex(x[:4], x[4:]) for x in (query, key))
        angle = torch.tensor(
            [down, down * 30**-0.5, across, across * 30**-0.5], dtype=torch.float64
        )
        expected = float(
            (q * k.conj() * torch.polar(torch.ones(4, dtype=torch.float64), -angle)).real.sum()
        )
        for row in range(rows):
            for column in range(columns):
                if 0 <= row + down < rows and 0 <= column + across < columns:
                    found = float(score[row, column, row + down, column + across])
                    assert math.isclose(found, expected, rel_tol=1e-9, abs_tol=1e-9)
