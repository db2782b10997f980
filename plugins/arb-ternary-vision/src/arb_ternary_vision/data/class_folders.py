"""Folders with one sub-folder of files per class."""

from __future__ import annotations

from pathlib import Path

import attrs

from arb_ternary.config.options import option
from arb_ternary.errors import DataError, nearest
from arb_ternary_vision.data.source import fraction_option


@attrs.frozen(kw_only=True)
class ClassFoldersConfig:
    """Options of a data source of files in folders. Paths are relative to the working directory."""

    path: str = option(
        help="a folder with one sub-folder of files per class, whose name is the name of the class"
    )
    validation: str | None = option(
        None, "such a folder with files for validation; null = hold out some of `path`"
    )
    validation_fraction: float | None = fraction_option("validation")

    def __attrs_post_init__(self) -> None:
        if self.validation is not None and self.validation_fraction is not None:
            raise ValueError(
                "validation and validation_fraction exclude each other: give one of them"
            )


@attrs.frozen
class ClassFolders:
    """The files of a folder.

    Attributes:
        folder: the folder.
        classes: names of the sub-folders, sorted.
        files: class by class, each sorted by name.
        labels: the class of each file, an index into ``classes``.
    """

    folder: Path
    classes: tuple[str, ...]
    files: list[Path] = attrs.field(repr=False)
    labels: list[int] = attrs.field(repr=False)


def list_class_folders(folder: Path, noun: str, suffixes: frozenset[str]) -> ClassFolders:
    """List the files of a folder. Names that begin with a dot are ignored.

    Args:
        folder: the folder of the classes.
        noun: what one file is, for error messages.
        suffixes: suffixes that a file may have, in lower case.

    Raises:
        DataError: there is no such folder, no class in it, a class without a file, or a file of
            another kind.
    """
    if not folder.is_dir():
        siblings = [each.name for each in folder.parent.iterdir()] if folder.parent.is_dir() else []
        close = nearest(folder.name, siblings)
        meant = f"Did you mean {folder.parent / close}? " if close else ""
        raise DataError(
            f"{folder}: no such folder",
            f"{meant}Paths are relative to the working directory, {Path.cwd()}.",
        )
    places = _visible(folder)
    for place in places:
        if not place.is_dir():
            raise DataError(
                f"{place}: a file next to the folders of the classes",
                "Move it into the folder of its class, or remove it.",
            )
    files: list[Path] = []
    labels: list[int] = []
    for label, place in enumerate(places):
        found = _visible(place)
        if not found:
            raise DataError(f"{place}: the class has no {noun}", "Add some, or remove the folder.")
        for file in found:
            if file.suffix.lower() not in suffixes or not file.is_file():
                raise DataError(
                    f"{file}: not a supported {noun} file; supported are "
                    f"{', '.join(sorted(suffixes))}",
                    "Convert it, or remove it.",
                )
        files += found
        labels += [label] * len(found)
    if not files:
        raise DataError(
            f"{folder}: there are no folders of classes in it",
            f"Files are expected as {folder / 'CLASS' / 'FILE'}.",
        )
    return ClassFolders(folder, tuple(place.name for place in places), files, labels)


def list_validation(
    path: str, train: ClassFolders, noun: str, suffixes: frozenset[str]
) -> ClassFolders:
    """List the files for validation, labelled with the classes of ``train``.

    Raises:
        DataError: as for :func:`list_class_folders`; or the folder is that of the training files,
            or has a class that they do not have.
    """
    folder = Path(path)
    if folder.resolve() == train.folder.resolve():
        raise DataError(
            f"{path}: this is the folder of the training {noun}s",
            "Set validation to null to hold out some of them.",
        )
    found = list_class_folders(folder, noun, suffixes)
    for name in found.classes:
        if name not in train.classes:
            close = nearest(name, train.classes)
            known = f"Classes are: {', '.join(train.classes)}."
            raise DataError(
                f"{folder / name}: the training {noun}s have no class of this name",
                f"Did you mean {close}?" if close else known,
            )
    labels = [train.classes.index(found.classes[label]) for label in found.labels]
    return ClassFolders(folder, train.classes, found.files, labels)


def _visible(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
