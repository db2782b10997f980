"""Puts rounded weights, and what is not rounded, into the student."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from arb_ternary.errors import ConfigError
from arb_ternary.ternary.module import TernaryModule
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_upcycle.projection.rounded import Rounded
from arb_ternary_upcycle.student import ATTENTION, check_student, student_of

#: Norms that have gains without ``inner_gains``.
_OUTER_NORMS: Final = ("attention.norm", "feed_forward.norm", "final_norm")
#: Norms of queries and keys. No linear reads them, so that no weights could take their gains.
_HEAD_NORMS: Final = ("attention.query_norm", "attention.key_norm")


def check_projectable(model: nn.Module, source: DecoderConfig) -> Decoder:
    """Return the student if it can hold the rounded weights of a float model of ``source``.

    Raises:
        ConfigError: its shapes or its attention differ, its linears are float, it has experts, or
            it multiplies updates or logits.
    """
    check_student(model, source)
    student = student_of(model)
    config = student.config
    if "linears" in config.float_parts:
        raise ConfigError(
            "projection: the model's linears are float, so there is nothing to round",
            "Take `linears` out of `model.float_parts`.",
        )
    if config.experts:
        raise ConfigError(
            "projection: the model has experts; weights are fitted only to inputs that all tokens "
            "have",
            "Use a decoder with `experts: 0`.",
        )
    for name in ATTENTION:
        mine = getattr(config, name)
        wanted = getattr(source, name)
        if mine != wanted:
            raise ConfigError(
                f"projection: `{name}` of the model is {mine}, that of the stage is {wanted}",
                "Give the model the attention of the stage; the phase `surgery` makes a stage with "
                "decoupled attention.",
            )
    for name in ("residual_scale", "logit_scale"):
        if getattr(config, name) != 0:
            raise ConfigError(
                f"projection: the model's `{name}` is {getattr(config, name)}; the weights of the "
                "stage contain such a factor already",
                f"Set `model.{name}: 0`.",
            )
    return student


@torch.no_grad()
def fill(
    root: nn.Module, tensors: Mapping[str, Tensor], rounded: Mapping[str, Rounded], *, residue: bool
) -> None:
    """Fill a block or the whole student.

    Args:
        root: the block or student.
        tensors: float weights by their paths below ``root``.
        rounded: those of them that are rounded.
        residue: whether accumulators start with the residue of rounding.

    Raises:
        ConfigError: a gain is not 1, and the student's norm has none that could hold it.
    """
    modules = dict(root.named_modules())
    for name, tensor in tensors.items():
        module = modules.get(name)
        if module is None:  # a parameter or buffer of its own
            where, _, last = name.rpartition(".")
            getattr(root.get_submodule(where), last).copy_(tensor)
        elif isinstance(module, TernaryModule) and name in rounded:
            made = rounded[name]
            votes = made.votes(module.shape.vote_bits) if residue else None
            module.set_trits(made.trits, made.exponent, votes)
        elif isinstance(module, TernaryModule) or getattr(module, "weight", None) is None:
            _set_gain_of_ones(name, module, tensor)
        else:
            module.get_parameter("weight").copy_(tensor)


def _set_gain_of_ones(name: str, norm: nn.Module, gain: Tensor) -> None:
    """Set the gain of a norm that can hold no float gain, or has none; it must be 1."""
    if not bool((gain == 1).all()):
        keep = "add `norms` to `model.float_parts`"
        if name not in _OUTER_NORMS:
            keep += " and set `model.inner_gains: true`"
        if name in _HEAD_NORMS:
            hint = f"{keep.capitalize()}."
        else:
            hint = (
                "Put the phase `fold_rotate` before this one, which moves gains into the weights, "
                f"or {keep}."
            )
        raise ConfigError(
            f"projection: {name} has gains other than 1, and the model's norm has no float gains",
            hint,
        )
    if isinstance(norm, TernaryModule):
        norm.set_trits(torch.ones_like(norm.trits()), torch.zeros_like(norm.exponent))
