"""A teacher's sizes, tokenizer and data, without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from arb_ternary.config.fields import to_plain
from arb_ternary.errors import ConfigError, DataError
from arb_ternary_interchange.importing import find_source
from arb_ternary_interchange.inspection import is_run
from arb_ternary_text.models.config import DecoderConfig
from arb_ternary_train.directory import RunDirectory, write_json
from arb_ternary_train.loading import load_config
from arb_ternary_train.model_state import run_of
from arb_ternary_upcycle.float_model import float_config

#: File next to a config for a tokenizer that has no file of its own.
TOKENIZER_FILE: Final = "tokenizer.json"


@frozen(eq=False)
class TeacherOutline:
    """The facts of a teacher that a student and its data need.

    Attributes:
        source: what it was read from: an absolute path, or an address.
        config: options of the float decoder that has its weights.
        vocabulary_size: number of token ids.
        tokenizer: ``to_json`` of its tokenizer; None if none came with it.
        data: a ``data:`` section of text for it; ``{run}`` in a value stands for the folder of its
            tokenizer's file. None if no tokenizer came with it.
        notes: what could not be mapped or was rounded, one sentence each.
    """

    source: str
    config: DecoderConfig
    vocabulary_size: int
    tokenizer: Mapping[str, Any] | None
    data: Mapping[str, Any] | None
    notes: tuple[str, ...]

    def data_in(self, folder: Path, *, path: str | None = None) -> dict[str, Any]:
        """Return the ``data:`` section of a run.

        Args:
            folder: for the file of the tokenizer; created if one is needed.
            path: text to train on; None = the text that goes with the teacher.

        Raises:
            DataError: the teacher has no tokenizer for text.
        """
        if self.data is None or self.tokenizer is None:
            raise DataError(
                f"{self.source}: no tokenizer came with it, so that text cannot be encoded",
                "Name the data yourself: {name: tokens, train: ids.npy, vocabulary_size: "
                f"{self.vocabulary_size}}}, or text with a tokenizer.",
            )
        section = dict(self.data)
        if path is not None:
            bytewise = self.tokenizer["kind"] == "bytes"
            tokenizer = "bytes" if bytewise else f"{{run}}/{TOKENIZER_FILE}"
            section = {"name": "text", "path": path, "tokenizer": tokenizer}
        placed = {key: _placed(value, folder) for key, value in section.items()}
        if placed != section:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / TOKENIZER_FILE, self.tokenizer)
        return placed


def _placed(value: Any, folder: Path) -> Any:
    return value.replace("{run}", str(folder.resolve())) if isinstance(value, str) else value


def absolute(source: str) -> str:
    """Make a path absolute; an address stays as it is."""
    return source if "://" in source else str(Path(source).resolve())


def read_outline(source: str) -> TeacherOutline:
    """Read the outline of a teacher.

    Args:
        source: a run directory or checkpoint, a folder of transformers, a GGUF file, or
            ``hf://org/name``.

    Raises:
        ConfigError: it is not a decoder.
        ArbError: there is no such teacher, or nothing installed reads it; see ``find_source`` and
            ``Importer.load``.
    """
    if "://" not in source and is_run(Path(source)):
        directory = run_of(Path(source))
        if directory is None:
            raise DataError(
                f"{source}: the checkpoint is in no run directory, which would describe its model"
            )
        return _outline_of_run(directory)
    found = find_source(source)
    imported = found.importer.load(found.path)
    options = dict(imported.model)
    name = options.pop("name", None)
    if name != "decoder":
        raise ConfigError(f"{source}: a {name}; a teacher is a `decoder`")
    tokenizer = imported.attachments.get("tokenizer")
    has_text = tokenizer is not None and tokenizer["kind"] != "ids"
    return TeacherOutline(
        absolute(source),
        float_config(DecoderConfig(**options)),
        imported.vocabulary_size,
        tokenizer,
        imported.data if has_text else None,
        tuple(imported.notes),
    )


def _outline_of_run(directory: RunDirectory) -> TeacherOutline:
    config = load_config(directory.config_file).config
    model = config.model
    if not isinstance(model.options, DecoderConfig) or model.name != "decoder":
        raise ConfigError(
            f"{directory.path}: its model is {model.name!r}; a teacher is a `decoder`"
        )
    data = to_plain(config.data, given=False)
    return TeacherOutline(
        absolute(str(directory.path)),
        float_config(model.options),
        int(directory.record()["vocabulary_size"]),
        directory.attachments().get("tokenizer"),
        data if isinstance(data, dict) else {"name": data},
        (),
    )
