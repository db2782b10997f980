"""A teacher's sizes, tokenizer and data, without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

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

#: Where a tokenizer goes that has no file of its own, in the folder of a config.
TOKENIZER_FILE = "tokenizer.json"


@frozen(eq=False)
class TeacherOutline:
    """What a student and its data need to know of a teacher.

    Attributes:
        source: what it was read from: an absolute path, or an address.
        config: options of the float decoder that has its weights.
        vocabulary_size: ids of its vocabulary.
        tokenizer: ``to_json`` of its tokenizer; None where none came with it.
        data: a ``data:`` section of text for it; ``{run}`` in a text stands for the folder of its
            tokenizer's file. None where its tokenizer did not come with it.
        notes: what could not be mapped or was rounded, a sentence each.
    """

    source: str
    config: DecoderConfig
    vocabulary_size: int
    tokenizer: Mapping[str, Any] | None
    data: Mapping[str, Any] | None
    notes: tuple[str, ...]

    def data_in(self, folder: Path, *, path: str | None = None) -> dict[str, Any]:
        """The ``data:`` section of a run, with the tokenizer in ``folder``, where it is written if
        a file is needed.

        Args:
            folder: made where it is needed.
            path: text of the user's own; None = that which goes with the teacher.

        Raises:
            DataError: text is asked for, and the teacher has no tokenizer.
        """
        if self.data is None or self.tokenizer is None:
            raise DataError(
                f"{self.source}: no tokenizer came with it, so that text cannot be encoded",
                "Name the data yourself: {name: tokens, train: ids.npy, vocabulary_size: "
                f"{self.vocabulary_size}}}, or text with a tokenizer.",
            )
        section = dict(self.data)
        if path is not None:
            tokenizer = (
                "bytes" if self.tokenizer["kind"] == "bytes" else f"{{run}}/{TOKENIZER_FILE}"
            )
            section = {"name": "text", "path": path, "tokenizer": tokenizer}
        placed = {key: _placed(value, folder) for key, value in section.items()}
        if placed != section:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / TOKENIZER_FILE, self.tokenizer)
        return placed


def _placed(value: Any, folder: Path) -> Any:
    return value.replace("{run}", str(folder.resolve())) if isinstance(value, str) else value


def absolute(source: str) -> str:
    """``source`` with an absolute path; an address as it is."""
    return source if "://" in source else str(Path(source).resolve())


def read_outline(source: str) -> TeacherOutline:
    """Look at a teacher: a run directory or checkpoint, a folder of transformers, a GGUF file, or
    ``hf://org/name``.

    Raises:
        ConfigError: it is no decoder.
        ArbError: there is no such teacher, or nothing installed reads it; see ``find_source`` and
            ``Importer.load``.
    """
    if "://" not in source and is_run(Path(source)):
        directory = run_of(Path(source))
        if directory is None:
            raise DataError(
                f"{source}: the checkpoint is in no run directory, which would say what model it "
                f"is of"
            )
        return _outline_of_run(directory)
    found = find_source(source)
    imported = found.importer.load(found.path)
    options = {key: value for key, value in imported.model.items() if key != "name"}
    if imported.model.get("name") != "decoder":
        raise ConfigError(f"{source}: a {imported.model.get('name')}; a teacher is a `decoder`")
    tokenizer = imported.attachments.get("tokenizer")
    return TeacherOutline(
        absolute(source),
        float_config(DecoderConfig(**options)),
        imported.vocabulary_size,
        tokenizer,
        None if tokenizer is None or tokenizer["kind"] == "ids" else imported.data,
        tuple(imported.notes),
    )


def _outline_of_run(directory: RunDirectory) -> TeacherOutline:
    config = load_config(directory.config_file).config
    if not isinstance(config.model.options, DecoderConfig) or config.model.name != "decoder":
        raise ConfigError(
            f"{directory.path}: its model is {config.model.name!r}; a teacher is a `decoder`"
        )
    data = to_plain(config.data, given=False)
    return TeacherOutline(
        absolute(str(directory.path)),
        float_config(config.model.options),
        int(directory.record()["vocabulary_size"]),
        directory.attachments().get("tokenizer"),
        data if isinstance(data, dict) else {"name": data},
        (),
    )
