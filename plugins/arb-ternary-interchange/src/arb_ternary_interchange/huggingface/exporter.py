"""The exporter ``hf``: a decoder as a folder that transformers loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import nn

from arb_ternary.errors import ArbError, ConfigError, UsageProblem
from arb_ternary_interchange.decoder.weights import TernaryWeight, exported_weight
from arb_ternary_interchange.huggingface.card import model_card
from arb_ternary_interchange.huggingface.packing import TRITS_PER_BYTE
from arb_ternary_interchange.huggingface.shards import write_shards
from arb_ternary_interchange.huggingface.special_tokens import token_ids
from arb_ternary_interchange.huggingface.tensors import HEAD, FileTensors
from arb_ternary_interchange.huggingface.tokenizer_files import write_tokenizer
from arb_ternary_interchange.huggingface.written_config import config_json, quantization_json
from arb_ternary_interchange.options import HfExportConfig, Layout
from arb_ternary_text.data.special_tokens import NO_SPECIAL_TOKENS
from arb_ternary_text.data.tokenizers import from_json, special_tokens
from arb_ternary_text.models.decoder import Decoder
from arb_ternary_train.durable import flush
from arb_ternary_train.task_results import TaskResult, read_task_results


class HfExporter:
    """Writes ``config.json``, ``generation_config.json``, the weights, the tokenizer's files and a
    ``README.md``.
    """

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
        if destination.exists() and not _is_empty_folder(destination):
            raise UsageProblem(
                f"{destination}: exists already", "Give the name of a new folder, or remove it."
            )
        exporter = self
        if self._config.layout == "auto":
            layout: Layout = "dense_w1a8" if _has_ternary_linears(model) else "dense"
            exporter = HfExporter(evolve(self._config, layout=layout))
        staging = destination.with_name(f".{destination.name}.writing")
        try:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            exporter._write(model, staging, metadata)
            for path in staging.iterdir():
                flush(path)
            staging.replace(destination)
        except OSError as error:
            raise ArbError(f"{destination}: cannot be written: {error}") from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)

    def _write(self, model: Decoder, folder: Path, metadata: Mapping[str, Any]) -> None:
        layout = self._config.layout
        dtype = self._config.float_dtype
        config = config_json(model.config, model.vocabulary_size, dtype)
        tokenizer = metadata.get("tokenizer")
        special = None
        if self._config.tokenizer and tokenizer is not None:
            write_tokenizer(folder, tokenizer, model.config.max_length)
            special = special_tokens(from_json(tokenizer))
        ids = token_ids(special or NO_SPECIAL_TOKENS)
        config |= ids

        float_modules = self._float_modules(model)
        if layout != "dense":
            if not _has_ternary_linears(model):
                raise ConfigError(
                    f"layout: {layout} is for ternary linears, and those of this model are float",
                    "Use `--layout dense`.",
                )
            config["quantization_config"] = quantization_json(layout, float_modules)

        kept = ("name", "step", "model", "versions")
        facts = {key: metadata[key] for key in kept if key in metadata}
        tensors = FileTensors(model, layout, getattr(torch, dtype), float_modules)
        write_shards(
            folder,
            tensors,
            names=tensors.names(),
            limit=self._config.shard_megabytes * 10**6,
            metadata={"format": "pt", "arb_ternary": json.dumps(facts, sort_keys=True)},
        )
        _write_json(folder / "config.json", config)
        _write_json(folder / "generation_config.json", {**ids, "do_sample": True})
        name = str(metadata.get("name", "model"))
        results = _results(metadata)
        card = model_card(name, config["architectures"][0], layout, dtype, special, results)
        (folder / "README.md").write_text(card, encoding="utf-8")

    def unmapped(self, metadata: Mapping[str, Any]) -> tuple[str, ...]:
        """Name the tasks whose results are those of another step."""
        kept = {result.task for result in _results(metadata)}
        lost = [task for task in metadata.get("tasks", {}) if task not in kept]
        if not lost:
            return ()
        return (
            f"the card lacks results of {', '.join(lost)}, which the run had at another step than "
            f"{metadata['step']}",
        )

    def _float_modules(self, model: Decoder) -> list[str]:
        """Return the linears that transformers leaves as they are: the head, or none."""
        is_float = model.config.tied or "head" in model.config.float_parts
        unpackable = self._config.layout == "packed" and model.vocabulary_size % TRITS_PER_BYTE
        return [HEAD] if is_float or unpackable else []


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _results(metadata: Mapping[str, Any]) -> list[TaskResult]:
    """Return the results of tasks at the step that is exported."""
    found = read_task_results(metadata.get("tasks", {}), "tasks.json")
    return [result for result in found if result.step == metadata["step"]]


def _has_ternary_linears(model: Decoder) -> bool:
    """Whether a forward pass multiplies by ternary matrices. The option ``float_parts`` does not
    say: some models with float linears make them ternary in every pass.
    """
    return isinstance(exported_weight(model, "blocks.0.attention.output"), TernaryWeight)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
