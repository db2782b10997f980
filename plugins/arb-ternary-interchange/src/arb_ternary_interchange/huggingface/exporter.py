"""The exporter ``hf``: a decoder as a folder that transformers loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, nn

from arb_ternary.errors import ArbError, ConfigError, UsageProblem
from arb_ternary_interchange.decoder.architecture import architecture_of
from arb_ternary_interchange.decoder.weights import TernaryWeight, exported_weights, weight_of
from arb_ternary_interchange.huggingface.codes import TRITS_PER_BYTE, pack
from arb_ternary_interchange.huggingface.config import HfExportConfig
from arb_ternary_interchange.huggingface.tensor_names import hf_name, is_linear, neutral_names
from arb_ternary_interchange.huggingface.tokenizer_files import write_tokenizer
from arb_ternary_interchange.huggingface.written_config import config_json, quantization_json
from arb_ternary_interchange.safetensors.shards import write_shards
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.durable import flush

_HEAD = "lm_head"
#: Rows that are made dense together.
_ROWS = 1024


class HfExporter:
    """Writes ``config.json``, ``generation_config.json``, the weights and the tokenizer's files."""

    writes_accumulators = False

    def __init__(self, config: HfExportConfig) -> None:
        self._config = config

    def export(self, model: nn.Module, destination: Path, metadata: Mapping[str, Any]) -> None:
        """Write ``model`` to the folder ``destination``, which appears when it is complete.

        Raises:
            ConfigError: the model, its tokenizer or the layout has no form in transformers.
            UsageProblem: there is something at ``destination``.
            ArbError: the folder cannot be written.
        """
        if not isinstance(model, Decoder):
            raise ConfigError(
                f"model: a {type(model).__name__} has no class in transformers; only decoders have"
            )
        if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
            raise UsageProblem(
                f"{destination}: exists already", "Give the name of a new folder, or remove it."
            )
        staging = destination.with_name(f".{destination.name}.writing")
        try:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            self._write(model, staging, metadata)
            for path in staging.iterdir():
                flush(path)
            staging.replace(destination)
        except OSError as error:
            raise ArbError(f"{destination}: cannot be written: {error}") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _write(self, model: Decoder, folder: Path, metadata: Mapping[str, Any]) -> None:
        config = model.config
        layout = self._config.layout
        described = config_json(config, model.vocabulary_size, self._config.float_dtype)
        tokenizer = metadata.get("tokenizer")
        if self._config.tokenizer and tokenizer is not None:
            write_tokenizer(folder, tokenizer, config.max_length)
        skipped = [_HEAD] if config.tied or "head" in config.float_parts else []
        if layout != "dense" and not _has_ternary_linears(model):
            raise ConfigError(
                f"layout: {layout} is for ternary linears, and those of this model are float",
                "Use `--layout dense`.",
            )
        if layout == "packed" and not skipped and model.vocabulary_size % TRITS_PER_BYTE:
            skipped = [_HEAD]
        if layout != "dense":
            described["quantization_config"] = quantization_json(layout, skipped)
        kept = {
            key: metadata[key] for key in ("name", "step", "model", "versions") if key in metadata
        }
        write_shards(
            folder,
            self._tensors(model, skipped),
            names=self._names(model),
            limit=self._config.shard_megabytes * 10**6,
            metadata={"format": "pt", "arb_ternary": json.dumps(kept, sort_keys=True)},
        )
        _write_json(folder / "config.json", described)
        _write_json(
            folder / "generation_config.json",
            {"bos_token_id": None, "eos_token_id": None, "do_sample": True},
        )

    def _names(self, model: Decoder) -> list[str]:
        """Names of all tensors of the files, and perhaps of some more."""
        config = model.config
        architecture = architecture_of(config, reglu2=True)
        biases = config.query_key_value_bias
        paths = list(neutral_names(architecture, config.layers, tied=config.tied, biases=biases))
        scales = [
            f"{hf_name(path)}_scale"
            for path in paths
            if is_linear(path) and self._config.layout != "dense"
        ]
        others = [
            hf_name(path).replace("v_proj", "o_proj")
            for path in paths
            if path.endswith("biases.value")
        ]
        return [hf_name(path) for path in paths] + scales + others

    def _tensors(self, model: Decoder, skipped: list[str]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the file, in the order in which the model computes."""
        dtype: torch.dtype = getattr(torch, self._config.float_dtype)
        for name, weight in exported_weights(model):
            stored = hf_name(name)
            if isinstance(weight, Tensor):
                yield stored, weight.to(dtype)
                if stored.endswith("v_proj.bias") and _has_output_bias(model):
                    yield (
                        stored.replace("v_proj", "o_proj"),
                        torch.zeros(model.config.width, dtype=dtype),
                    )
            elif (
                self._config.layout == "dense"
                or not is_linear(name)
                or stored.removesuffix(".weight") in skipped
            ):
                yield stored, _dense(weight, dtype)
            elif self._config.layout == "packed":
                yield stored, pack(_packable(name, weight))
                yield (
                    f"{stored}_scale",
                    torch.tensor([1 / (weight.scale * 2.0 ** _exponent(name, weight))]),
                )
            else:
                # The class computes in the dtype in which these lie in the file, whatever the rest
                # is loaded as.
                yield stored, _dense(evolve(weight, scale=1.0), dtype)
                yield f"{stored}_scale", torch.tensor([weight.scale])


def _dense(weight: TernaryWeight, dtype: torch.dtype) -> Tensor:
    """The matrix in ``dtype``, made some rows at a time: on the way its numbers and exponents have
    32 bits each.
    """
    dense = torch.empty(weight.trits.shape, dtype=dtype)
    for start in range(0, len(dense), _ROWS):
        some = slice(start, start + _ROWS)
        dense[some] = weight.rows(some).dense()
    return dense


def _has_ternary_linears(model: Decoder) -> bool:
    """Whether a pass multiplies ternary matrices; some models make them of float weights, and say
    ``linears`` too.
    """
    return isinstance(weight_of(model.get_submodule("blocks.0.attention.output")), TernaryWeight)


def _has_output_bias(model: Decoder) -> bool:
    """Whether the class wants a bias of the output projection beside those of q, k and v: all but
    Qwen2.
    """
    return (
        model.config.has_query_key_norm
        or model.config.has_sub_norms
        or model.config.feed_forward_activation == "relu2"
    )


def _packable(name: str, weight: TernaryWeight) -> Tensor:
    """Trits that can be packed; ConfigError when their number of rows cannot."""
    if weight.row_scale is not None:
        raise ConfigError(
            f"layout: packed has one scale a matrix, and the rows of {name} have factors",
            "Use `--layout dense_w1a8`, or dense, or train with `model.row_scales: false`.",
        )
    rows = weight.trits.shape[0]
    if rows % TRITS_PER_BYTE:
        raise ConfigError(
            f"layout: packed takes rows by fours, and {name} has {rows}",
            "Use `--layout dense_w1a8`, or dense.",
        )
    return weight.trits


def _exponent(name: str, weight: TernaryWeight) -> int:
    """The exponent of a matrix; ConfigError when its groups have different ones."""
    exponent = weight.one_exponent()
    if exponent is None:
        low = int(weight.exponent.min())
        high = int(weight.exponent.max())
        raise ConfigError(
            f"layout: packed has one scale a matrix, and the groups of {name} have exponents from "
            f"{low} to {high}",
            "Use `--layout dense_w1a8`, which has the same arithmetic, or train with "
            "`model.group_size: tensor`.",
        )
    return exponent


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def build(config: HfExportConfig) -> HfExporter:
    """Factory of the exporter ``hf``."""
    return HfExporter(config)
