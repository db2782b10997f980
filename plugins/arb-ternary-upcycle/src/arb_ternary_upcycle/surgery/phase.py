"""The phase ``surgery``: the stage ``surgery``, a float model with the student's decoupled
attention.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from attrs import evolve
from torch import Tensor

from arb_ternary.errors import ConfigError
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoupled_attention import spread_planes
from arb_ternary_text.models.rms_norm import rms_norm
from arb_ternary_train.seeding import derive_seed, derived_generator
from arb_ternary_upcycle.calibration import calibration_tokens, held_out_tokens
from arb_ternary_upcycle.float_model import FloatModel, block_outline
from arb_ternary_upcycle.float_model_writer import FloatModelWriter
from arb_ternary_upcycle.folding import without_preset
from arb_ternary_upcycle.probe import probe_loss
from arb_ternary_upcycle.stage_options import SurgeryConfig
from arb_ternary_upcycle.stage_phase import StagePhase
from arb_ternary_upcycle.stages import find_stage, stage_folder
from arb_ternary_upcycle.student import check_student, student_of
from arb_ternary_upcycle.surgery.blocks import Split, copied, drawn_parts, split_block
from arb_ternary_upcycle.surgery.factors import second_moment_root
from arb_ternary_upcycle.surgery.pairs import choose_planes, fit_constants, pair_moments

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


class SurgeryPhase(StagePhase):
    """Gives the newest float model of the run decoupled attention."""

    name = "surgery"

    def __init__(self, config: SurgeryConfig) -> None:
        self.config = config
        self._source: FloatModel | None = None
        self._target: DecoderConfig | None = None
        self._tokens: Tensor | None = None
        self._seed = 0

    def writer(self, context: TrainingContext) -> FloatModelWriter:
        """See ``StagePhase``."""
        options = self.config
        student = student_of(context.model).config
        source = self._source = find_stage(context, None, ("prepared", "teacher"))
        check_student(context.model, source.config)
        if source.config.has_query_key_norm:
            raise ConfigError(
                f"{source.path}: its queries and keys are normalised, and decoupled attention has "
                f"no such norms",
                "Keep the teacher's attention: leave out the phase `surgery`, and `attention` in "
                "the model.",
            )
        target = self._target = decoupled_config(source.config, student)
        self._seed = context.seed if options.seed is None else options.seed
        if options.policy == "svd":
            self._tokens = calibration_tokens(
                context,
                tokens=options.calibration_tokens,
                block_size=options.block_size,
                seed=derive_seed(self._seed, "surgery"),
            ).to(context.device)
        return FloatModelWriter(
            stage_folder(context, "surgery"),
            target,
            source.vocabulary_size,
            source.tokenizer,
            source.dtype,
            origin={
                "source": source.digest,
                "data": context.data.fingerprint(),
                "policy": options.policy,
                "tokens": options.calibration_tokens,
                "block_size": options.block_size,
                "ridge": options.ridge,
                "seed": self._seed,
            },
        )

    def ends(self) -> Mapping[str, Tensor]:
        """See ``StagePhase``."""
        return self._parts[0].ends()

    def blocks(self, done: frozenset[int]) -> Iterator[tuple[int, Mapping[str, Tensor]]]:
        """See ``StagePhase``."""
        source, target = self._parts
        streams = (
            [] if self._tokens is None else [source.embed(sample[None]) for sample in self._tokens]
        )
        last = max(set(range(source.config.layers)) - done)
        for number in range(last + 1):
            tensors = source.weights(f"blocks.{number}.")
            if number not in done:
                generator = derived_generator(self._seed, "surgery", number)
                if self._tokens is None:
                    drawn = drawn_parts(
                        block_outline(target), generator, fresh=self.config.policy == "fresh"
                    )
                    yield number, _completed({**copied(tensors), **drawn}, target)
                else:
                    split = fitted_split(streams, tensors, source.config, target, self.config.ridge)
                    free = torch.randn(
                        target.sem_dim or 0, target.width, generator=generator
                    ) / math.sqrt(target.width)
                    made = split_block(tensors, source.config, target, split, free)
                    yield number, _completed(made, target)
            if streams and number < last:
                block = source.block(number).to(streams[0].device)
                streams = [source.through(block, x_1SD) for x_1SD in streams]

    def judge(self, context: TrainingContext, model: FloatModel) -> Mapping[str, float]:
        """Losses of the teacher and of the model with the new attention, on held-out text."""
        source = self._parts[0]
        tokens = self.config.probe_tokens
        if not tokens:
            return {}
        samples = held_out_tokens(
            context, tokens=tokens, block_size=min(256, model.config.max_length)
        )
        before, after = (probe_loss(each, samples) for each in (source, model))
        context.note(
            f"surgery: {before:.4f} nats a token of held-out text before, {after:.4f} after"
        )
        return {
            "teacher_nll": before,
            "nll": after,
            "perplexity_ratio": math.exp(min(after - before, 700)),
        }

    @property
    def _parts(self) -> tuple[FloatModel, DecoderConfig]:
        if self._source is None or self._target is None:
            raise RuntimeError("the stage before it has not been found")
        return self._source, self._target


def decoupled_config(source: DecoderConfig, student: DecoderConfig) -> DecoderConfig:
    """The options of ``source`` with the attention of ``student``."""
    return evolve(
        without_preset(source),
        attention="decoupled",
        sem_dim=student.sem_dim,
        geo_dim=student.geo_dim,
        rotary_dim=student.rotary_dim,
        attention_gate=student.attention_gate,
        null_key_value=student.null_key_value,
        tie_query_key=student.tie_query_key,
    )


def attention_inputs(
    streams: list[Tensor], tensors: Mapping[str, Tensor], config: DecoderConfig
) -> Tensor:
    """What the queries and keys of a block read, ``[N, S, D]``; ``streams`` are residual streams
    ``[1, S, D]``.
    """
    gain = tensors["attention.norm"].to(streams[0].device)
    return torch.cat([rms_norm(x_1SD, config.norm_eps) * gain for x_1SD in streams])


def fitted_split(
    streams: list[Tensor],
    tensors: Mapping[str, Tensor],
    source: DecoderConfig,
    target: DecoderConfig,
    ridge: float,
) -> Split:
    """How a block is best divided, by what its queries and keys give for these residual streams."""
    normed_NSD = attention_inputs(streams, tensors, source)
    query_NSE, key_NSE = (_projected(normed_NSD, tensors, name) for name in ("query", "key"))
    moments_HFF = pair_moments(query_NSE, key_NSE, source).cpu()
    kept_GK = choose_planes(moments_HFF, source.key_heads, (target.geo_dim or 0) // 2, ridge)
    inputs_MD = normed_NSD.flatten(0, 1)
    if source.query_key_value_bias:
        inputs_MD = F.pad(inputs_MD, (0, 1), value=1.0)
    return Split(
        kept_GK, fit_constants(moments_HFF, kept_GK, ridge), second_moment_root(inputs_MD).cpu()
    )


def _projected(normed_NSD: Tensor, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    projected = F.linear(normed_NSD, tensors[f"attention.{name}"].to(normed_NSD.device))
    bias = tensors.get(f"attention.biases.{name}")
    return projected if bias is None else projected + bias.to(normed_NSD.device)


def _completed(tensors: Mapping[str, Tensor], target: DecoderConfig) -> dict[str, Tensor]:
    """With what a new block of the target has besides: gates, null keys and biases at 0, planes of
    all speeds.
    """
    made = dict(tensors)
    for name, outline in block_outline(target).items():
        if name not in made and name == "attention.planes":
            made[name] = spread_planes(target)
        elif name not in made:
            made[name] = torch.zeros(outline.shape)
    return made


def build(config: SurgeryConfig) -> SurgeryPhase:
    """The factory that the phase ``surgery`` registers."""
    return SurgeryPhase(config)
