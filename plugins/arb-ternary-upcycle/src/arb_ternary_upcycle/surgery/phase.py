"""The phase ``surgery``: the stage ``surgery``, a float model with decoupled attention."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from attrs import define, evolve
from torch import Tensor

from arb_ternary.errors import ConfigError
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_text.models.decoupled_attention import spread_planes
from arb_ternary_text.models.rms_norm import rms_norm
from arb_ternary_train.seeding import derive_seed, derived_generator
from arb_ternary_upcycle.calibration import calibration_tokens, held_out_tokens
from arb_ternary_upcycle.float_model import FloatModel, block_outline
from arb_ternary_upcycle.folding import without_preset
from arb_ternary_upcycle.probe import probe_loss
from arb_ternary_upcycle.stage_options import SurgeryConfig
from arb_ternary_upcycle.stage_phase import Stage, StagePhase
from arb_ternary_upcycle.stages import find_stage, stage_folder
from arb_ternary_upcycle.student import check_student, student_of
from arb_ternary_upcycle.surgery.blocks import Split, copied, drawn_parts, split_block
from arb_ternary_upcycle.surgery.factors import second_moment_root
from arb_ternary_upcycle.surgery.pairs import choose_planes, fit_constants, pair_moments

if TYPE_CHECKING:
    from arb_ternary_train.context import TrainingContext


@define(eq=False)
class SurgeryPhase(StagePhase):
    """Gives the newest float model of the run the student's decoupled attention."""

    name = "surgery"

    config: SurgeryConfig

    def prepare(self, context: TrainingContext) -> Stage:
        """See ``StagePhase``."""
        options = self.config
        student = student_of(context.model).config
        source = _source(context)
        check_student(context.model, source.config)
        if source.config.has_query_key_norm:
            raise ConfigError(
                f"{source.path}: its queries and keys are normalised; decoupled attention has no "
                "such norms",
                "Keep the teacher's attention: leave out the phase `surgery`, and `attention` in "
                "the model.",
            )
        target = decoupled_config(source.config, student)
        seed = context.seed if options.seed is None else options.seed
        tokens = None
        if options.policy == "svd":
            tokens = calibration_tokens(
                context,
                tokens=options.calibration_tokens,
                block_size=options.block_size,
                seed=derive_seed(seed, "surgery"),
            ).to(context.device)

        def blocks() -> Iterator[Mapping[str, Tensor]]:
            if tokens is None:
                return self._drawn(source, target, seed)
            return self._fitted(source, target, tokens, seed)

        return Stage(
            folder=stage_folder(context, "surgery"),
            config=target,
            vocabulary_size=source.vocabulary_size,
            tokenizer=source.tokenizer,
            dtype=source.dtype,
            origin={
                "source": source.digest,
                "data": context.data.fingerprint(),
                "policy": options.policy,
                "tokens": options.calibration_tokens,
                "block_size": options.block_size,
                "ridge": options.ridge,
                "seed": seed,
            },
            blocks=blocks,
            ends=source.ends,
        )

    def judge(self, context: TrainingContext, model: FloatModel) -> Mapping[str, float]:
        """Return the losses of the teacher and of the stage on held-out text."""
        if not self.config.probe_tokens:
            return {}
        block_size = min(256, model.config.max_length)
        samples = held_out_tokens(context, tokens=self.config.probe_tokens, block_size=block_size)
        before = probe_loss(_source(context), samples)
        after = probe_loss(model, samples)
        context.note(
            f"surgery: {before:.4f} nats per token of held-out text before, {after:.4f} after"
        )
        return {
            "teacher_nll": before,
            "nll": after,
            "perplexity_ratio": math.exp(min(after - before, 700)),
        }

    def _drawn(
        self, source: FloatModel, target: DecoderConfig, seed: int
    ) -> Iterator[Mapping[str, Tensor]]:
        """Yield blocks with queries and keys that are drawn at random."""
        fresh = self.config.policy == "fresh"
        for number in range(source.config.layers):
            generator = derived_generator(seed, "surgery", number)
            drawn = drawn_parts(block_outline(target), generator, fresh=fresh)
            yield _completed({**copied(source.block_weights(number)), **drawn}, target)

    def _fitted(
        self, source: FloatModel, target: DecoderConfig, tokens: Tensor, seed: int
    ) -> Iterator[Mapping[str, Tensor]]:
        """Yield blocks with the teacher's queries and keys in fewer features."""
        streams = [source.embed(sample[None]) for sample in tokens]
        layers = source.config.layers
        for number in range(layers):
            tensors = source.block_weights(number)
            split = fitted_split(streams, tensors, source.config, target, self.config.ridge)
            generator = derived_generator(seed, "surgery", number)
            free = torch.randn(target.sem_dim or 0, target.width, generator=generator)
            free = free / math.sqrt(target.width)
            yield _completed(split_block(tensors, source.config, target, split, free), target)
            if number + 1 < layers:
                block = source.block(number).to(tokens.device)
                streams = [source.through(block, x_1SD) for x_1SD in streams]


def _source(context: TrainingContext) -> FloatModel:
    return find_stage(context, None, ("prepared", "teacher"))


def decoupled_config(source: DecoderConfig, student: DecoderConfig) -> DecoderConfig:
    """Return the options of ``source`` with the attention of ``student``."""
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
    """Return the inputs of a block's queries and keys, ``[N, S, D]``.

    ``streams`` are the residual streams of the samples, ``[1, S, D]`` each.
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
    """Divide a block's queries and keys as fits these residual streams best."""
    normed_NSD = attention_inputs(streams, tensors, source)
    query_NSE = _projected(normed_NSD, tensors, "query")
    key_NSE = _projected(normed_NSD, tensors, "key")
    moments_HFF = pair_moments(query_NSE, key_NSE, source).cpu()
    kept_GK = choose_planes(moments_HFF, source.key_heads, (target.geo_dim or 0) // 2, ridge)
    constants = fit_constants(moments_HFF, kept_GK, ridge)
    inputs_MD = normed_NSD.flatten(0, 1)
    if source.query_key_value_bias:
        inputs_MD = F.pad(inputs_MD, (0, 1), value=1.0)
    return Split(kept_GK, constants, second_moment_root(inputs_MD).cpu())


def _projected(normed_NSD: Tensor, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    projected = F.linear(normed_NSD, tensors[f"attention.{name}"].to(normed_NSD.device))
    bias = tensors.get(f"attention.biases.{name}")
    return projected if bias is None else projected + bias.to(normed_NSD.device)


def _completed(tensors: Mapping[str, Tensor], target: DecoderConfig) -> dict[str, Tensor]:
    """Add what only a new block of the target has: gates, null keys and biases of 0, planes."""
    made = dict(tensors)
    for name, outline in block_outline(target).items():
        if name not in made and name == "attention.planes":
            made[name] = spread_planes(target)
        elif name not in made:
            made[name] = torch.zeros(outline.shape)
    return made
