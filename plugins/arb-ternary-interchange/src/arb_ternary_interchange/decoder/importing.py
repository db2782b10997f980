"""From a published model to the model of a run: where scales go, what stays float, and how the
weights get there.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from arb_ternary.errors import ConfigError, DataError
from arb_ternary_interchange.decoder.config import FloatSources, Scales
from arb_ternary_interchange.decoder.filling import Placement, check_shape, expected_tensors, fill
from arb_ternary_interchange.decoder.folding import fold_block
from arb_ternary_interchange.decoder.published import PublishedModel, ScaledTrits
from arb_ternary_interchange.decoder.scales import Grouping, coarser, split_scales
from arb_ternary_interchange.protocols import ImportedModel
from arb_ternary_text.data.tokenizers import padded_to
from arb_ternary_text.models.architectures import PRESETS, preset_of
from arb_ternary_text.models.config import MAX_SCALE_EXPONENT, DecoderConfig

_ENDS = ("embedding", "head")
_ROUND = "Use `--scales round`, which takes the nearest power of two of each."
#: Rows that are looked at together.
_ROWS = 1024


@frozen
class _Matrix:
    """What a look at a matrix tells of it."""

    shape: tuple[int, int]
    ternary: bool
    grouping: Grouping = "tensor"
    remainder: float | None = 1.0
    error: float = 0.0
    by_rows: bool = True


def imported(
    published: PublishedModel, *, scales: Scales = "fold", float_sources: FloatSources = "keep"
) -> ImportedModel:
    """What a run needs of a published model. Every tensor is looked at here, and read again when
    the model is filled.

    Args:
        published: the model in its format.
        scales: what becomes of scales that are no powers of two. ``fold``: they go into gains and
            eps where a norm can take them (:mod:`.folding`), the model
            computes the same, and what no norm can take stays a float factor of its linear, or of
            its rows where these have different ones. ``round``: each becomes the nearest power of
            two, and gains stay as they are. ``float``: each linear keeps its scale as a float
            factor.
        float_sources: what becomes of float matrices. ``keep``: embedding, head or linears are
            float parts. Where only some linears are ternary, all become float. ``ternary``: they
            become trits by the absmean rule, with the residue of the rounding in the accumulators.

    Raises:
        DataError: a tensor is missing or of another shape than the options say, or is not finite.
        ConfigError: options contradict each other, or scales cannot be kept as ``scales`` says.
    """
    return _Import(published, scales, float_sources).result()


class _Import:
    def __init__(
        self, published: PublishedModel, scales: Scales, float_sources: FloatSources
    ) -> None:
        self.published = published
        self.scales = scales
        self.float_sources = float_sources
        self.notes = list(published.unmapped)
        self.names = set(published.names())
        self.options: dict[str, Any] = {"architecture": published.architecture, **published.options}
        self.options.setdefault("tie_embeddings", "head" not in self.names)
        if self.options.get("group_size") == "tensor":
            self.options.setdefault("scale_rule", "frozen")
        # The sizes are known; how weights are held is decided below.
        self._leave_the_preset_where_it_does_not_fit()
        self.config = self._config({})
        if self.config.attention != "standard":
            raise ConfigError(
                f"model: attention {self.config.attention} is this program's own, and no format "
                f"has its tensors",
                "Give the plugin's options `attention: standard`; a run of ours is continued with "
                "`--init-from`.",
            )
        if self.config.tied and "head" in self.names:
            self.names.discard("head")
            self.notes.append("head: left out, for the model's head is its embedding")
        self.matrices: dict[str, _Matrix] = {}
        self.dense: set[str] = set()
        self.vectors: dict[str, Tensor] = {}
        self.eps: dict[str, float] = {}
        self.factors: dict[str, float] = {}
        self.row_scales = False

    def result(self) -> ImportedModel:
        """Look at every tensor, decide, and say how the model is filled."""
        self._look_at_all()
        self._choose_dense()
        self._place_scales()
        self._place_logit_scale()
        self._config(self._held())
        tokenizer = None if self.published.tokenizer is None else dict(self.published.tokenizer)
        tokenizer = padded_to(tokenizer, self.published.vocabulary_size)
        return ImportedModel(
            model={"name": "decoder", **self.options},
            vocabulary_size=self.published.vocabulary_size,
            attachments={"tokenizer": tokenizer},
            fill=partial(
                fill,
                self.published,
                Placement(tuple(self.matrices), self.vectors, self.eps, self.factors),
            ),
            notes=tuple(self.notes),
            data=_data(tokenizer),
        )

    # --- what there is

    def _leave_the_preset_where_it_does_not_fit(self) -> None:
        """An architecture with an option that its preset does not have is held by the options
        alone.
        """
        try:
            DecoderConfig(**self.options)
        except (ValueError, TypeError):
            name = self.options.pop("architecture")
            preset = preset_of(name if name in PRESETS else None)
            decided = {"activation": preset.activation, "sub_norms": preset.sub_norms}
            decided["query_key_norm"] = preset.query_key_norm
            self.options = {**decided, **self.options}
            self.notes.append(
                f"the model is not quite of architecture {name}: other formats may not take it back"
            )

    def _look_at_all(self) -> None:
        wanted = {}
        # The number of layers is the file's word: the first tensor that is not there ends it.
        for name, shape in expected_tensors(
            self.config, self.published.vocabulary_size, self.names
        ):
            if name not in self.names:
                raise DataError(f"{name}: not in the model, whose architecture and sizes need it")
            wanted[name] = shape
        for name in sorted(self.names - set(wanted)):
            self.notes.append(f"{name}: left out, for the decoder has no such part")
        for name, shape in wanted.items():
            found = self.published.read(name)
            check_shape(name, found, shape)
            if isinstance(found, ScaledTrits):
                if len(shape) == 1:
                    raise DataError(f"{name}: ternary, and a gain or bias has to be float")
                split = split_scales(name, found)
                by_rows = split.row_factors is not None
                facts = split.grouping, split.remainder, split.error, by_rows
                self.matrices[name] = _Matrix((shape[0], shape[1]), True, *facts)
            elif not all(bool(torch.isfinite(part).all()) for part in torch.split(found, _ROWS)):
                raise DataError(f"{name}: a number is not finite")
            elif len(shape) == 1:
                self.vectors[name] = found.to(torch.float64)
            else:
                self.matrices[name] = _Matrix(
                    (shape[0], shape[1]), self.float_sources == "ternary", "row"
                )
        self._complete_biases()

    def _complete_biases(self) -> None:
        """Where a layer has biases, all of the decoder's have; those that the model lacks are 0."""
        every = {f"blocks.{number}.attention.biases.query" for number in range(self.config.layers)}
        if every.isdisjoint(self.vectors):
            return
        for name, shape in expected_tensors(self.config, self.published.vocabulary_size, every):
            if ".biases." in name:
                self.vectors.setdefault(name, torch.zeros(shape, dtype=torch.float64))

    def _linears(self) -> list[str]:
        return [name for name in self.matrices if name not in _ENDS]

    def _choose_dense(self) -> None:
        """Which ternary matrices the decoder can only hold as float ones."""
        floats = [name for name in self._linears() if not self.matrices[name].ternary]
        ternary = [name for name in self._linears() if self.matrices[name].ternary]
        if floats and ternary:
            self.dense |= set(ternary)
            self.notes.append(
                f"{len(ternary)} of {len(floats) + len(ternary)} linears are ternary and become "
                f"float, for {floats[0]} is float; float_sources: ternary makes all of them ternary"
            )
        # An embedding has one exponent a row, and no norm before it or after it takes a factor.
        for name in _ENDS if self.config.tied else _ENDS[:1]:
            matrix = self.matrices.get(name)
            if matrix is None or not matrix.ternary:
                continue
            kept = self.scales != "round" and matrix.remainder != 1.0
            if kept or isinstance(matrix.grouping, int):
                self.dense.add(name)
                self.notes.append(
                    f"{name}: its scales are no powers of two, one a row; kept as a float part"
                )

    # --- where scales go

    def _place_scales(self) -> None:
        held = {
            name: m for name, m in self.matrices.items() if m.ternary and name not in self.dense
        }
        if self.scales == "round":
            worst = max(held, key=lambda name: held[name].error, default=None)
            if worst is not None and held[worst].error > 0:
                self.notes.append(
                    "scales are rounded to powers of two: the largest relative error is "
                    f"{held[worst].error:.1%}, of {worst}"
                )
            return
        # Where one linear has factors of rows all of them do, and what these hold needs no other
        # place.
        self.row_scales = any(matrix.remainder is None for matrix in held.values())
        remainders: dict[str, float] = {}
        for name, matrix in held.items():
            if self.row_scales and matrix.by_rows:
                continue
            if matrix.remainder is None:
                raise ConfigError(
                    f"{name}: its scales differ by more than powers of two, and no gain or factor "
                    f"takes them all",
                    _ROUND,
                )
            if matrix.remainder != 1.0:
                remainders[name] = matrix.remainder
        if self.scales == "float":
            self.factors = remainders
        else:
            self._fold_all(remainders)
        if self.row_scales:
            if self.factors:
                raise ConfigError(
                    f"{next(iter(self.factors))}: no norm takes its factor, and rows of other "
                    f"linears have factors",
                    _ROUND,
                )
            self.notes.append(
                "rows have float factors, which learn; `--scales round` makes them powers of two"
            )

    def _fold_all(self, remainders: Mapping[str, float]) -> None:
        for number in range(self.config.layers):
            self._fold(f"blocks.{number}.", remainders)
        if (factor := remainders.get("head")) is not None:
            self._multiply("final_norm", factor)
        if self.factors:
            kept = len(self.factors)
            self.notes.append(
                f"{kept} float factors of linears are kept, which no norm of architecture "
                f"{self.published.architecture} takes; `--scales round` makes them powers of two"
            )

    def _fold(self, prefix: str, remainders: Mapping[str, float]) -> None:
        inside = {
            name.removeprefix(prefix): r
            for name, r in remainders.items()
            if name.startswith(prefix)
        }
        config = self.config
        folded = fold_block(
            inside,
            config.feed_forward_activation,
            sub_norms=config.has_sub_norms,
            query_key_norm=config.has_query_key_norm,
        )
        for name, factor in (*folded.gains.items(), *folded.biases.items()):
            self._multiply(prefix + name, factor)
        self.eps |= {prefix + name: factor * config.norm_eps for name, factor in folded.eps.items()}
        self.factors |= {prefix + name: factor for name, factor in folded.left.items()}

    def _multiply(self, name: str, factor: float) -> None:
        if name in self.vectors:
            self.vectors[name] = self.vectors[name] * factor

    def _place_logit_scale(self) -> None:
        """Where only the final norm has a gain, and that is one power of two, it is the model's
        ``logit_scale``.
        """
        gains = {name: gain for name, gain in self.vectors.items() if ".biases." not in name}
        final = gains.pop("final_norm")
        if any(_has_gain(gain) for gain in gains.values()) or "logit_scale" in self.options:
            return
        mantissa, exponent = torch.frexp(final[0])
        same = float(mantissa) == 0.5 and bool((final == final[0]).all())
        if same and abs(int(exponent) - 1) <= MAX_SCALE_EXPONENT:
            self.options["logit_scale"] = int(exponent) - 1
            self.vectors["final_norm"] = torch.ones_like(final)

    # --- how it is held

    def _held(self) -> dict[str, Any]:
        gains = {name: gain for name, gain in self.vectors.items() if ".biases." not in name}
        inner = [
            name
            for name in gains
            if name.endswith(("output_norm", "hidden_norm", "query_norm", "key_norm"))
        ]
        dense = {name for name, m in self.matrices.items() if not m.ternary or name in self.dense}
        parts = [name for name in _ENDS if name in dense]
        if self.config.tied and "embedding" in dense:
            parts.append("head")
        if any(_has_gain(gain) for gain in gains.values()):
            parts.append("norms")
        if dense & set(self._linears()):
            parts.append("linears")
        groupings = [
            m.grouping
            for name, m in self.matrices.items()
            if name not in dense and name != "embedding"
        ]
        chosen: dict[str, Any] = {
            "float_parts": parts,
            "inner_gains": any(_has_gain(gains[name]) for name in inner),
            "stored_eps": bool(self.eps),
            "linear_scales": bool(self.factors),
            "row_scales": self.row_scales,
            "query_key_value_bias": any(".biases." in name for name in self.vectors),
        }
        if groupings:
            size = chosen["group_size"] = self.options.get("group_size", coarser(groupings))
            chosen["scale_rule"] = (
                "frozen" if size == "tensor" else self.options.get("scale_rule", "residual")
            )
        if "linears" in parts:
            chosen["activations"] = self.options.get("activations", "float")
        return {name: value for name, value in chosen.items() if value not in (False, [])}

    def _config(self, chosen: Mapping[str, Any]) -> DecoderConfig:
        self.options |= chosen
        try:
            return DecoderConfig(**self.options)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"the model cannot be held by the decoder: {error.args[0]}"
            ) from error


def _has_gain(gain: Tensor) -> bool:
    return not bool((gain == 1).all())


def _data(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """The data to fine-tune with: the built-in text, or token files where text cannot be
    encoded.
    """
    if tokenizer["kind"] == "ids":
        return {
            "name": "tokens",
            "train": "tokens.npy",
            "vocabulary_size": tokenizer["vocabulary_size"],
        }
    name = "bytes" if tokenizer == {"kind": "bytes"} else "{run}/tokenizer.json"
    return {"name": "shakespeare", "tokenizer": name}
