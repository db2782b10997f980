"""The config of progressive training in Python: model, training, and the section
``training.progressive``.

Unlike the configs of runs these can be changed after they were made, option by option; every
assignment is checked as the file was. What options say of each other is checked by
:meth:`StackWiseConfig.validate`, which whoever uses the config calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import attrs
from attrs import define
from attrs.validators import optional

from arb_ternary.config.errors import Fault, raise_faults
from arb_ternary.config.fields import without_effect
from arb_ternary.config.loading import load_as
from arb_ternary.config.options import Rule, one_of, option
from arb_ternary.errors import ConfigError
from arb_ternary_progressive.growth_config import (
    PRECISIONS,
    GrowthConfig,
    Precision,
    above_zero,
    at_least_one,
    boolean,
)

if TYPE_CHECKING:
    from arb_ternary_text.models.config import DecoderConfig

_natural = Rule(
    "a whole number of at least 0", lambda value: type(value) is int and value >= 0, {"minimum": 0}
)


def _is_fractions(_instance: Any, attribute: Any, value: Any) -> None:
    if value is None:
        return
    from arb_ternary_progressive.time import check_fractions

    try:
        check_fractions(value)
    except ValueError as error:
        raise ValueError(f"'{attribute.name}' {error}") from error


@define(kw_only=True)
class ProgressiveConfig(GrowthConfig):
    """The section ``training.progressive``: how a rack grows, and what a config of ``arb train``
    says elsewhere.
    """

    new_stack_precision: Precision = option(
        "full",
        "what a new stack is stored in: full (float32), half (float16), bfloat16, nvfp4 (4 bits, "
        "frozen), ternary, qlora (frozen 4-bit or ternary base with adapters)",
        validator=one_of(*PRECISIONS),
    )
    blocks_per_stack: int = option(4, "blocks of a new stack", validator=at_least_one)
    training_objective: Literal["mlm", "clm", "custom"] = option(
        "mlm",
        "what is predicted: hidden tokens, the next token, or the targets in the batch",
        validator=one_of("mlm", "clm", "custom"),
    )
    time_step_fractions: list[float] | dict[int, float] | None = option(
        None,
        "share of tokens hidden at each time step; null = .15 to .85 evenly",
        validator=_is_fractions,
    )
    mask_token_id: int | None = option(
        None,
        "what stands for a hidden token; null = the last id of the vocabulary",
        validator=optional(_natural),
    )
    seed: int = option(0, "seed of new stacks, masks and times", validator=_natural)


@define(kw_only=True)
class ModelConfig:
    """The parts of the model that every stack shares: the section ``model``."""

    vocab_size: int = option(
        256, "token ids, the one that stands for a hidden token included", validator=at_least_one
    )
    d_model: int = option(256, "features of the residual stream", validator=at_least_one)
    d_ff: int | None = option(
        None,
        "hidden features of a feed-forward layer; null = as the activation asks",
        validator=optional(at_least_one),
    )
    n_heads: int = option(4, "query heads", validator=at_least_one)
    n_kv_heads: int | None = option(
        None, "key and value heads; null = n_heads", validator=optional(at_least_one)
    )
    max_length: int = option(512, "context: longest sequence, in tokens", validator=at_least_one)
    causal: bool | None = option(
        None,
        "a position sees only itself and earlier ones; null = where the objective is clm",
        validator=optional(boolean),
    )
    activation: Literal["relu2", "swiglu"] = option(
        "relu2", "feed-forward non-linearity", validator=one_of("relu2", "swiglu")
    )
    rotary_base: float = option(
        10000.0, "longest wavelength of the rotary embedding over 2 pi", validator=above_zero
    )
    tie_embeddings: bool = option(False, "the head uses the embedding's weights", validator=boolean)
    ends: Literal["full", "ternary"] | None = option(
        None,
        "what embedding and head are stored in; null = ternary where new stacks are ternary, else "
        "full",
        validator=optional(one_of("full", "ternary")),
    )
    learned_norms: bool = option(
        False, "pre-norms and the final norm have a learned gain", validator=boolean
    )
    sub_norms: bool = option(
        True, "normalise also what enters the output and down projections", validator=boolean
    )
    group_size: Literal[32, 64, 128, 256, "row"] = option(
        128,
        "weights of a row that share an exponent in ternary linears",
        validator=one_of(32, 64, 128, 256, "row"),
    )
    activations: Literal["int8", "float"] = option(
        "float", "precision of what enters each linear", validator=one_of("int8", "float")
    )
    gradients: Literal["int8", "float"] = option(
        "float",
        "precision of the gradients that ternary modules multiply with",
        validator=one_of("int8", "float"),
    )


@define(kw_only=True)
class TrainingConfig:
    """The section ``training``."""

    progressive: ProgressiveConfig = option(help="how the rack grows", factory=ProgressiveConfig)
    epochs_per_stack: int = option(1, "passes over the data for each stack", validator=at_least_one)
    steps_per_stack: int | None = option(
        None,
        "optimizer steps for each stack, in place of whole passes; null = epochs_per_stack",
        validator=optional(at_least_one),
    )
    lr: float = option(1e-3, "learning rate of float parameters", validator=above_zero)
    rate: float = option(
        0.1,
        "rate of ternary modules: trits that a weight moves in a step whose gradient is one "
        "standard deviation",
        validator=above_zero,
    )


@define(kw_only=True)
class StackWiseConfig:
    """Model and training of a rack, from a file or from keywords."""

    model: ModelConfig = option(help="what every stack shares", factory=ModelConfig)
    training: TrainingConfig = option(help="how the rack is trained", factory=TrainingConfig)
    _origins: dict[Any, Any] = attrs.field(init=False, factory=dict, repr=False, eq=False)
    _source: str = attrs.field(init=False, default="", repr=False, eq=False)

    @classmethod
    def from_yaml(
        cls, path: str | os.PathLike[str], overrides: Iterable[str] = ()
    ) -> StackWiseConfig:
        """Read a YAML file; ``overrides`` are ``"path=value"`` each.

        Raises:
            ConfigError: the file or its content is wrong; every fault is listed with file and line.
        """
        from arb_ternary.plugins.registry import Registry

        # This config names no components: no plugin need be loaded.
        loaded = load_as(cls, path, overrides, registry=Registry({}))
        loaded.config._origins = dict(loaded.origins)
        loaded.config._source = loaded.source
        return loaded.config

    def validate(self) -> None:
        """See that every option is right, by itself and beside the others, and does something.

        A builder may be asked for any stacks, of other precisions and with other adapters than the
        config says: what only such a stack would use is no fault.

        Raises:
            ConfigError: it is not; every fault is listed, with file and line where the config comes
                from a file.
        """
        faults = []
        sections: tuple[tuple[tuple[str, ...], Any], ...] = (
            (("model",), self.model),
            (("training",), self.training),
            (("training", "progressive"), self.training.progressive),
        )
        for where, section in sections:
            try:
                attrs.validate(section)
            except (ValueError, TypeError) as error:
                faults.append(Fault(where, str(error.args[0])))
        progressive = self.training.progressive
        found = [*progressive.contradictions(), *progressive.always_idle()]
        faults += [Fault(("training", "progressive", key), message) for key, message in found]
        if self.training.steps_per_stack is not None:
            reason = "'steps_per_stack' says how long a stack is trained"
            idle = without_effect(self.training, reason, "epochs_per_stack")
            faults += [Fault(("training", key), message) for key, message in idle]
        if not faults:
            try:
                self.decoder_config()
            except (ValueError, ConfigError) as error:
                faults.append(Fault(("model",), str(error)))
        if faults:
            raise_faults(faults, self._origins, self._source)

    def decoder_config(self, default_precision: Precision | None = None) -> DecoderConfig:
        """What the decoder is made with. Its ``float_parts`` are those of the ends: a stack has its
        own.

        Args:
            default_precision: of new stacks, where it is not ``new_stack_precision``.

        Raises:
            ValueError: options contradict each other.
        """
        from arb_ternary_text.models.config import DecoderConfig

        model = self.model
        progressive = self.training.progressive
        precision = (
            progressive.new_stack_precision if default_precision is None else default_precision
        )
        ends = model.ends or ("ternary" if precision == "ternary" else "full")
        norms = ("norms",) if model.learned_norms else ()
        return DecoderConfig(
            width=model.d_model,
            layers=1,
            heads=model.n_heads,
            kv_heads=model.n_kv_heads,
            feed_forward=model.d_ff,
            activation=model.activation,
            causal=progressive.training_objective == "clm"
            if model.causal is None
            else model.causal,
            rotary_base=model.rotary_base,
            max_length=model.max_length,
            tie_embeddings=model.tie_embeddings,
            group_size=model.group_size,
            activations=model.activations,
            gradients=model.gradients,
            float_parts=("embedding", "head", *norms) if ends == "full" else (),
            learned_norms=model.learned_norms,
            sub_norms=model.sub_norms,
            zero_residual=progressive.zero_residual,
        )
