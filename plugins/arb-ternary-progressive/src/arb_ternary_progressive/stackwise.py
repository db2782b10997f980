"""The config of the guide, for training in Python: model, training, and ``training.progressive``.

Unlike the config of a run it can be changed after it was made, option by option. Every assignment
is checked like a value of a file. :meth:`StackWiseConfig.validate` checks how options go together;
builders and trainers call it before they use a config.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

import attrs
from attrs import define
from attrs.validators import optional

from arb_ternary.config.errors import Fault, raise_faults
from arb_ternary.config.fields import unused_options
from arb_ternary.config.loading import load_as
from arb_ternary.config.options import HELP, LARGEST_INT64, option, whole
from arb_ternary.errors import ConfigError
from arb_ternary.plugins.registry import Registry
from arb_ternary_progressive.config import (
    GrowthConfig,
    Precision,
    above_zero,
    among,
    at_least_one,
    boolean,
    counts_epochs,
)
from arb_ternary_progressive.time import check_fractions
from arb_ternary_text.models.config import DecoderConfig, FloatPart

Objective: TypeAlias = Literal["mlm", "clm", "custom"]

_natural = whole(0)


def valid_fractions(_instance: Any, attribute: Any, value: Any) -> None:
    """Validate the shares of hidden tokens by time step; an attrs validator."""
    try:
        check_fractions(value)
    except ValueError as error:
        raise ValueError(f"'{attribute.name}' {error}") from error


def _decoder_option(name: str) -> Any:
    """Declare the option ``name`` of :class:`DecoderConfig`."""
    declared = attrs.fields_dict(DecoderConfig)[name]
    return attrs.field(
        default=declared.default,
        validator=declared.validator,
        metadata={HELP: declared.metadata[HELP]},
    )


@define(kw_only=True)
class ProgressiveConfig(GrowthConfig):
    """The section ``training.progressive``: growth, objective, masks and seed."""

    # Racks that Python builds have no model to take these two from.
    new_stack_precision: Precision = option(
        "full",
        "format of a new stack: full (float32), half (float16), bfloat16, nvfp4 (4 bits, frozen), "
        "ternary, qlora (frozen 4-bit or ternary base with adapters)",
        validator=among(Precision),
    )
    blocks_per_stack: int = option(4, "blocks of a new stack", validator=at_least_one)

    training_objective: Objective = option(
        "mlm",
        "what is predicted: hidden tokens, the next token, or the targets in the batch",
        validator=among(Objective),
    )
    time_step_fractions: list[float] | dict[int, float] | None = option(
        None,
        "share of tokens hidden at each time step; null = .15 to .85 evenly",
        validator=optional(valid_fractions),
    )
    mask_token_id: int | None = option(
        None,
        "id of the mask token; null = the last id of the vocabulary",
        validator=optional(_natural),
    )
    seed: int = option(
        0, "seed of new stacks, masks and times", validator=_natural, largest=LARGEST_INT64
    )


@define(kw_only=True)
class ModelConfig:
    """The section ``model``: the sizes that all stacks share."""

    vocab_size: int = option(256, "token ids, the mask token included", validator=at_least_one)
    d_model: int = _decoder_option("width")
    d_ff: int | None = _decoder_option("feed_forward")
    n_heads: int = _decoder_option("heads")
    max_length: int = _decoder_option("max_length")
    causal: bool | None = option(
        None,
        "a position sees only itself and earlier ones; null = if the objective is clm",
        validator=optional(boolean),
    )


@define(kw_only=True)
class TrainingConfig:
    """The section ``training``."""

    progressive: ProgressiveConfig = option(help="how the rack grows", factory=ProgressiveConfig)
    epochs_per_stack: int = option(
        1,
        "passes over the data for each stack",
        validator=at_least_one,
        active_when=counts_epochs,
    )
    steps_per_stack: int | None = option(
        None,
        "optimizer steps for each stack; null = epochs_per_stack",
        validator=optional(at_least_one),
    )
    lr: float = option(1e-3, "learning rate of float parameters", validator=above_zero)
    rate: float = option(
        0.1,
        "rate of ternary modules: trits that a weight moves per step if its gradient is one "
        "standard deviation",
        validator=above_zero,
    )


@define(kw_only=True)
class StackWiseConfig:
    """Model and training of a rack, from a file or from keywords."""

    model: ModelConfig = option(help="the sizes that all stacks share", factory=ModelConfig)
    training: TrainingConfig = option(help="how the rack is trained", factory=TrainingConfig)
    _origins: dict[Any, Any] = attrs.field(init=False, factory=dict, repr=False, eq=False)
    _source: str = attrs.field(init=False, default="", repr=False, eq=False)

    @classmethod
    def from_yaml(
        cls, path: str | os.PathLike[str], overrides: Iterable[str] = ()
    ) -> StackWiseConfig:
        """Read a YAML file.

        Args:
            path: the file.
            overrides: ``"path=value"`` each; they take precedence over the file.

        Raises:
            ConfigError: the file or its content is wrong; every fault is listed with file and line.
        """
        # This config names no components, so no plugin needs to be loaded.
        loaded = load_as(cls, path, overrides, registry=Registry())
        loaded.config._origins = dict(loaded.origins)
        loaded.config._source = loaded.source
        return loaded.config

    def validate(self) -> None:
        """Check every option, by itself and together with the others.

        An option that does nothing is a fault. A builder may be asked for any stacks, of other
        precisions and with other adapters than the config says, so an option that only such a stack
        would use is none.

        Raises:
            ConfigError: every fault is listed, with file and line if the config comes from a file.
        """
        progressive = self.training.progressive
        sections: dict[tuple[str, ...], Any] = {
            ("model",): self.model,
            ("training",): self.training,
            ("training", "progressive"): progressive,
        }
        faults = []
        for path, section in sections.items():
            for key, message in unused_options(section):
                faults.append(Fault((*path, key), message))
        for key, message in progressive.contradictions():
            faults.append(Fault(("training", "progressive", key), message))
        if not faults:
            try:
                self.decoder_config()
            except (ValueError, ConfigError) as error:
                faults.append(Fault(("model",), str(error)))
        if faults:
            raise_faults(faults, self._origins, self._source)

    def decoder_config(self, default_precision: Precision | None = None) -> DecoderConfig:
        """Return the options of the decoder.

        Its ``float_parts`` are those of embedding and head, which are ternary if new stacks are; a
        stack has its own.

        Args:
            default_precision: precision of new stacks; None = ``new_stack_precision``.

        Raises:
            ValueError: options contradict each other.
        """
        model = self.model
        progressive = self.training.progressive
        causal = model.causal
        if causal is None:
            causal = progressive.training_objective == "clm"
        ternary = (default_precision or progressive.new_stack_precision) == "ternary"
        ends: tuple[FloatPart, ...] = () if ternary else ("embedding", "head")
        return DecoderConfig(
            width=model.d_model,
            feed_forward=model.d_ff,
            heads=model.n_heads,
            max_length=model.max_length,
            layers=1,
            causal=causal,
            activation="relu2",
            activations="float",
            sub_norms=True,
            tie_embeddings=False,
            float_parts=ends,
            zero_residual=progressive.zero_residual,
        )
