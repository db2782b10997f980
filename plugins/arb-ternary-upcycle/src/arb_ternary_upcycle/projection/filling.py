"""Rounded weights, and what is not rounded, into the student."""

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
from arb_ternary_upcycle.student import check_student, student_of

_ATTENTION: Final = (
    "attention",
    "sem_dim",
    "geo_dim",
    "rotary_dim",
    "attention_gate",
    "null_key_value",
    "tie_query_key",
)


def check_projectable(model: nn.Module, source: DecoderConfig) -> Decoder:
    """The student, if it can hold the rounded weights of a float model with the options ``source``.

    Raises:
        ConfigError: its shapes or its attention are others, its linears are float, it has experts,
            or it multiplies updates or logits.
    """
    check_student(model, source)
    student = student_of(model)
    config = student.config
    if "linears" in config.float_parts:
        raise ConfigError(
            "projection: the model's linears are float, and there is nothing to round",
            "Take `linears` out of `model.float_parts`.",
        )
    if config.experts:
        raise ConfigError(
            "projection: the model has experts, and weights are fitted only to inputs that all "
            "tokens have",
            "Use a decoder with `experts: 0`.",
        )
    wrong = [name for name in _ATTENTION if getattr(config, name) != getattr(source, name)]
    if wrong:
        name = wrong[0]
        raise ConfigError(
            f"projection: `{name}` of the model is {getattr(config, name)}, that of the stage is "
            f"{getattr(source, name)}",
            "Give the model the attention of the stage; the phase `surgery` makes a stage with "
            "decoupled attention.",
        )
    for name in ("residual_scale", "logit_scale"):
        if getattr(config, name) != 0:
            raise ConfigError(
                f"projection: the model's `{name}` is {getattr(config, name)}, and the weights "
                f"have theirs in them",
                f"Set `model.{name}: 0`.",
            )
    return student


def give_rounded(module: TernaryModule, rounded: Rounded, *, residue: bool) -> None:
    """Trits, exponents and, with ``residue``, accumulators."""
    votes = rounded.votes(module.shape.vote_bits) if residue else None
    module.set_trits(rounded.trits, rounded.exponent, votes)


@torch.no_grad()
def fill(
    root: nn.Module, tensors: Mapping[str, Tensor], rounded: Mapping[str, Rounded], *, residue: bool
) -> None:
    """Give ``root``, a block or the whole student, ``tensors`` by their paths below it; those in
    ``rounded`` as trits.

    Raises:
        ConfigError: a gain is not 1, and the student's norm has none that could hold it.
    """
    modules = dict(root.named_modules())
    for name, tensor in tensors.items():
        module = modules.get(name)
        if name in rounded and isinstance(module, TernaryModule):
            give_rounded(module, rounded[name], residue=residue)
        elif module is None:
            where, _, last = name.rpartition(".")
            getattr(root.get_submodule(where), last).copy_(tensor)
        elif isinstance(module, TernaryModule) or getattr(module, "weight", None) is None:
            _give_ones(name, module, tensor)
        else:
            module.get_parameter("weight").copy_(tensor)


def _give_ones(name: str, norm: nn.Module, gain: Tensor) -> None:
    """A norm whose gain is ternary or missing takes gains of 1."""
    if not bool((gain == 1).all()):
        raise ConfigError(
            f"projection: {name} has gains that are not 1, and the model's norms have none that "
            f"are float",
            "Put the phase `fold_rotate` before this one, which has gains in the weights, or add "
            "`norms` to `model.float_parts`.",
        )
    if isinstance(norm, TernaryModule):
        norm.set_trits(torch.ones_like(norm.trits()), torch.zeros_like(norm.exponent))
