"""A residual convolutional network (He et al., 2016), ternary unless the config says otherwise.

Shapes: ``B`` images, ``C`` channels, ``H`` and ``W`` pixels, ``V`` classes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from arb_ternary.errors import UsageProblem
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.parts import make_linear, make_norm
from arb_ternary_vision.models.convnet_config import ConvnetConfig
from arb_ternary_vision.models.patch_embedding import check_images
from arb_ternary_vision.parts import make_channel_norm, make_conv


class ConvBlock(nn.Module):
    """``x + c down(norm(relu(up(norm(x)))^2))`` with ``c = 2**residual_scale``: two convolutions,
    pre-norms.

    Args:
        config: options of its parts.
        channels: ``C``.
        kernel_size: of both convolutions.
    """

    def __init__(self, config: DecoderConfig, channels: int, kernel_size: int) -> None:
        super().__init__()
        self.residual_scale = 2.0**config.residual_scale
        self.norm = make_channel_norm(config, channels)
        self.up = make_conv(config, channels, channels, kernel_size, padding=kernel_size // 2)
        self.hidden_norm = (
            make_channel_norm(config, channels, gain=False)
            if config.has_sub_norms
            else nn.Identity()
        )
        self.down = make_conv(config, channels, channels, kernel_size, padding=kernel_size // 2)
        if config.zero_residual:
            self.zero_residual_()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """The residual stream after the block."""
        hidden_BCHW = F.relu(self.up(self.norm(x_BCHW))).square()
        return torch.add(
            x_BCHW, self.down(self.hidden_norm(hidden_BCHW)), alpha=self.residual_scale
        )

    @torch.no_grad()
    def zero_residual_(self) -> None:
        """Make the block the identity; it still gets a gradient, from which it leaves it."""
        if isinstance(self.down, TernaryModule):
            self.down.set_trits(torch.zeros_like(self.down.trits()))
        else:
            nn.init.zeros_(self.down.weight)


class Convnet(nn.Module):
    """First convolution, stages of residual blocks with a convolution of stride 2 between them,
    mean, norm, head.

    Args:
        options: of the model.
        classes: ``V``.

    Raises:
        UsageProblem: ``classes`` is less than 1.
    """

    def __init__(self, options: ConvnetConfig, classes: int) -> None:
        super().__init__()
        if classes < 1:
            raise UsageProblem(f"classes: must be at least 1, not {classes}")
        self.options = options
        self.vocabulary_size = classes
        config = options.parts
        kernel = options.kernel_size
        channels = options.width
        self.embedding = make_conv(
            config, options.channels, channels, kernel, padding=kernel // 2, part="embedding"
        )
        self.blocks = nn.ModuleList()
        for stage in range(options.stages):
            if stage:
                between = make_conv(
                    config, channels, 2 * channels, kernel, stride=2, padding=kernel // 2
                )
                self.blocks.append(nn.Sequential(make_channel_norm(config, channels), between))
                channels *= 2
            self.blocks.extend(ConvBlock(config, channels, kernel) for _ in range(options.layers))
        self.final_norm = make_norm(config, channels, gain=True)
        self.head = make_linear(config, channels, classes, part="head")
        self._logit_scale = 2.0**config.logit_scale
        self._dtype: torch.dtype | None = None
        self._checkpoint_from: int | None = None

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Logits ``[B, V]`` of float images ``[B, C, H, W]``.

        Raises:
            UsageProblem: images of another shape than the model was made for.
        """
        check_images(self.options, images_BCHW)
        x_BCHW: Tensor = self.embedding(images_BCHW)
        if self._dtype is not None:
            x_BCHW = x_BCHW.to(self._dtype)
        recomputes = self._recomputes(len(images_BCHW))
        for block in self.blocks:
            if recomputes:
                # No randomness inside a block: votes are cast in the backward alone.
                x_BCHW = checkpoint(block, x_BCHW, use_reentrant=False, preserve_rng_state=False)
            else:
                x_BCHW = block(x_BCHW)
        logits_BV: Tensor = self.head(self.final_norm(x_BCHW.mean(dim=(2, 3))))
        return logits_BV if self._logit_scale == 1.0 else logits_BV * self._logit_scale

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Compute in ``dtype``: float parameters, and the activations between ternary modules."""
        self.to(dtype)
        self._dtype = dtype

    def set_activation_checkpointing(self, enabled: bool, threshold: int | None = None) -> None:
        """Keep only each block's input in training and recompute the rest in the backward.

        Args:
            enabled: False keeps every activation.
            threshold: fewest images in a batch for which it is done; None = always.

        Raises:
            UsageProblem: the threshold is negative.
        """
        if threshold is not None and threshold < 0:
            raise UsageProblem(
                f"activation checkpointing: the threshold must be at least 0, not {threshold}"
            )
        self._checkpoint_from = (threshold or 0) if enabled else None

    def _recomputes(self, images: int) -> bool:
        if self._checkpoint_from is None or images < self._checkpoint_from:
            return False
        return self.training and torch.is_grad_enabled()


def build(config: ConvnetConfig, vocabulary_size: int) -> Convnet:
    """The factory that the ``convnet`` model registers; ``vocabulary_size``: classes."""
    return Convnet(config, vocabulary_size)
