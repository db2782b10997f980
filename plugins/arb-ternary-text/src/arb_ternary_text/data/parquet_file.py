"""Parquet files, by the package pyarrow, which is imported when it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from arb_ternary.errors import DataError, EnvironmentProblem
from arb_ternary.plugins.discovery import install_command

#: Bytes that are read at once.
_CHUNK: Final = 1 << 20


@contextmanager
def open_parquet(path: Path) -> Iterator[Any]:
    """Open a file as pyarrow's ``ParquetFile``, and have errors of reading it be DataError.

    Raises:
        DataError: the file is damaged.
        EnvironmentProblem: pyarrow is not installed.
    """
    try:
        parquet = import_module("pyarrow.parquet")
        arrow = import_module("pyarrow")
    except ImportError as error:
        raise EnvironmentProblem(
            f"{path}: Parquet files need the package `pyarrow`, which is not installed",
            install_command("arb-ternary-text[parquet]"),
        ) from error
    try:
        # Page by page: a row group may be larger than memory.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=_CHUNK) as file:
            yield file
    except arrow.ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error
