"""Text of your own: a file, a folder of ``.txt`` files or a glob pattern.

A new source of text reads its files into a :class:`Text` and passes it to :func:`text_source` or
:func:`split_source`, which build tokenizer and streams.
"""

from __future__ import annotations

import codecs
import glob
import logging
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs
from numpy.typing import NDArray

from arb_ternary.config.options import option, optional
from arb_ternary.errors import DataError, nearest
from arb_ternary_text.data.source import (
    DEFAULT_FRACTION,
    StreamSource,
    part,
    require_one_validation,
)
from arb_ternary_text.data.tokenizers import (
    TOKENIZER_HELP,
    Tokenizer,
    UnknownCharacterError,
    build_tokenizer,
    encode_stream,
    tokenizer_name,
)

#: The program's log, which the command line shows.
_log: Final = logging.getLogger("arb_ternary.data")

#: What a file begins with, and its encoding. UTF-32 comes first: its mark begins with that of
#: UTF-16.
_MARKS: Final = (
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
#: Characters of ASCII, and those of them that no text contains.
_ASCII: Final = bytes(range(128))
_CONTROLS: Final = bytes(set(range(32)) - set(b"\t\n\f\r"))
#: Largest share of characters outside ASCII in a file that is taken for Windows-1252. Western
#: languages stay below it; Cyrillic or Asian text in an encoding of its own does not.
_WESTERN: Final = 0.3


@attrs.frozen
class TextConfig:
    """Options of the data source ``text``: UTF-8 text in files.

    Paths are relative to the working directory.
    """

    path: str = option(
        help="a text file, a folder (its .txt files in the order of their names, without those "
        "whose names begin with a dot) or a glob pattern"
    )
    validation: str | None = option(None, "text for validation: a file, a folder or a glob pattern")
    validation_fraction: float | None = option(
        None,
        f"share at the end of the text that is kept for validation if `validation` is null (null: "
        f"{DEFAULT_FRACTION})",
        validator=optional(part),
    )
    tokenizer: str = option("bytes", TOKENIZER_HELP, validator=tokenizer_name)

    def __attrs_post_init__(self) -> None:
        require_one_validation(self.validation, self.validation_fraction)


@attrs.frozen
class Text:
    """A text that knows which files it came from.

    Attributes:
        content: the text.
        origins: offset in ``content`` and name of each piece, in order.
    """

    content: str = attrs.field(repr=lambda text: f"<{len(text)} characters>")
    origins: tuple[tuple[int, str], ...]

    def locate(self, offset: int) -> tuple[str, int]:
        """Return where the character at ``offset`` came from.

        Returns:
            ``"name:line"``, and the offset from the start of the piece.
        """
        index = bisect_right(self.origins, offset, key=lambda origin: origin[0]) - 1
        start, name = self.origins[index]
        line = self.content.count("\n", start, offset) + 1
        return f"{name}:{line}", offset - start


def build(config: TextConfig) -> StreamSource:
    """Build the data source of ``config``.

    Raises:
        DataError: a file is missing, empty or not UTF-8, is both training and validation text, or
            contains a character that the tokenizer does not know; the path comes first.
        EnvironmentProblem: the tokenizer needs a package that is not installed.
    """
    training_files = find_text_files(config.path)
    if config.validation is None:
        whole = read_text(training_files)
        _log_files(config.path, training_files)
        fraction = config.validation_fraction or DEFAULT_FRACTION
        return split_source("text", whole, config.path, fraction, config.tokenizer)

    validation_files = find_text_files(config.validation)
    require_other_files(
        training_files,
        validation_files,
        "is both training and validation text",
        f"`path` is {config.path} and `validation` is {config.validation}",
    )
    training = read_text(training_files)
    validation = read_text(validation_files)
    _log_files(config.path, training_files)
    _log_files(config.validation, validation_files)
    return text_source("text", training, validation, config.tokenizer)


def _log_files(path: str, files: list[Path]) -> None:
    """Log how many files and bytes were read from a folder or for a pattern."""
    if files == [Path(path)]:
        return
    size = sum(file.stat().st_size for file in files)
    noun = "file" if len(files) == 1 else "files"
    _log.info("text %s: %d %s, %s bytes", path, len(files), noun, f"{size:,}")


def find_text_files(path: str, suffixes: Sequence[str] = (".txt",)) -> list[Path]:
    """Return the files that ``path`` names, in the order of their names.

    Files of a folder whose names begin with a dot are left out.

    Args:
        path: a file, a folder or a glob pattern.
        suffixes: those of the files of a folder that are read, in lower case.

    Raises:
        DataError: there is no such file.
    """
    place = Path(path)
    if place.is_file():
        return [place]
    if place.is_dir():
        visible = [file for file in place.iterdir() if not file.name.startswith(".")]
        named = [file for file in visible if file.suffix.lower() in suffixes]
        files = sorted(file for file in named if file.is_file())
        if not files:
            raise DataError(
                f"{path}: the folder has no {', '.join(suffixes)} file",
                f"A pattern reads other names or sub-folders: {path}/**/*{suffixes[0]}",
            )
        return files
    if glob.has_magic(path):
        # pathlib's glob takes no absolute patterns.
        matches = map(Path, glob.glob(path, recursive=True))  # noqa: PTH207
        files = sorted(match for match in matches if match.is_file())
        if not files:
            raise DataError(f"{path}: no file matches the pattern", _working_directory_hint())
        return files
    siblings = [file.name for file in place.parent.iterdir()] if place.parent.is_dir() else []
    close = nearest(place.name, siblings)
    meant = f"Did you mean {place.parent / close}? " if close else ""
    raise DataError(f"{path}: no such file or folder", meant + _working_directory_hint())


def require_other_files(
    training: list[Path], validation: list[Path], fault: str, options: str
) -> None:
    """Raise DataError, with ``fault`` and ``options``, if a file is in both lists."""
    shared = {path.resolve() for path in training} & {path.resolve() for path in validation}
    if shared:
        raise DataError(
            f"{min(shared)}: the file {fault}", f"{options}; they must name different files."
        )


def read_text(files: list[Path]) -> Text:
    """Read files one after another, each on a new line.

    Line ends are kept as they are.

    Raises:
        DataError: a file cannot be read or is not UTF-8, or all of them are empty.
    """
    pieces: list[str] = []
    origins: list[tuple[int, str]] = []
    length = 0
    for path in files:
        content = read_utf8(path)
        if not content:
            continue
        if pieces and not pieces[-1].endswith("\n"):
            pieces.append("\n")
            length += 1
        origins.append((length, str(path)))
        pieces.append(content)
        length += len(content)
    if not pieces:
        raise DataError(f"{', '.join(map(str, files))}: the text is empty")
    return Text("".join(pieces), tuple(origins))


def read_utf8(path: Path) -> str:
    """Return the text of a file, without a byte-order mark.

    Raises:
        DataError: the file cannot be read, or is not UTF-8; the message has the byte offset.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: the text cannot be read: {error.strerror}") from error
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8: 0x{content[error.start]:02x} at byte offset {error.start}: "
            f"{error.reason}",
            _conversion_hint(path, _seeming_utf_16(content) or _seeming_western(content, error)),
        ) from error
    # UTF-16 of ASCII characters is UTF-8, too, with a NUL after or before each character.
    encoding = _seeming_utf_16(content)
    if encoding is not None:
        raise DataError(f"{path}: not UTF-8", _conversion_hint(path, encoding))
    return text.removeprefix("\ufeff")


def _conversion_hint(path: Path, encoding: str | None) -> str:
    if encoding is None:
        return f"Convert it first, for example: iconv -f latin1 -t utf-8 {path}"
    return (
        f"It seems to be {encoding}. Convert it first: iconv -f {encoding} -t UTF-8 {path} > "
        "OTHER.txt"
    )


def _seeming_utf_16(content: bytes) -> str | None:
    """Return the UTF-16 or UTF-32 that a text seems to be in, as ``iconv`` names it.

    Without a mark, UTF-16 is recognised by the upper bytes of its characters: most of them are NUL,
    and no lower byte is.
    """
    for mark, encoding in _MARKS:
        if content.startswith(mark):
            return encoding
    if 0 not in content or len(content) < 2:
        return None
    first = content[::2]
    second = content[1::2]
    if 0 not in first and second.count(0) > len(second) / 2:
        return "UTF-16LE"
    if 0 not in second and first.count(0) > len(first) / 2:
        return "UTF-16BE"
    return None


def _seeming_western(content: bytes, error: UnicodeDecodeError) -> str | None:
    """Return ``Windows-1252`` if a text that is not UTF-8 seems to be in it.

    Latin-1 is the same for text without control characters.

    Args:
        content: the bytes of the text.
        error: where they are not UTF-8.
    """
    is_utf_8_before = not content[: error.start].isascii()
    if is_utf_8_before or error.reason == "unexpected end of data":
        return None
    try:
        content.decode("cp1252")
    except UnicodeDecodeError:
        return None
    has_controls = len(content.translate(None, _CONTROLS)) < len(content)
    foreign = len(content.translate(None, _ASCII))
    is_western = not has_controls and foreign <= _WESTERN * len(content)
    return "Windows-1252" if is_western else None


def text_source(name: str, training: Text, validation: Text, tokenizer: str) -> StreamSource:
    """Make the source of two texts.

    Args:
        name: name of the source in listings and errors.
        training: training text.
        validation: validation text.
        tokenizer: a tokenizer as a config names it; ``characters`` are those of ``training``.

    Raises:
        DataError: a text contains a character that the tokenizer does not know.
        EnvironmentProblem: the tokenizer needs a package that is not installed.
    """
    built = build_tokenizer(tokenizer, training.content)
    return StreamSource(name, built, _encode(built, training), _encode(built, validation))


def split_source(
    name: str, whole: Text, path: str, fraction: float, tokenizer: str
) -> StreamSource:
    """Make the source whose validation text is the last ``fraction`` of the characters of a text.

    Args:
        name: name of the source in listings and errors.
        whole: the text.
        path: name of the text in errors.
        fraction: share of the text, between 0 and 1.
        tokenizer: a tokenizer as a config names it; ``characters`` are those of the training text.

    Raises:
        DataError: the text is too short, or contains a character that the tokenizer does not know.
        EnvironmentProblem: the tokenizer needs a package that is not installed.
    """
    cut = len(whole.content) - round(len(whole.content) * fraction)
    if not 0 < cut < len(whole.content):
        raise DataError(
            f"{path}: {len(whole.content)} characters are too few to keep {fraction:g} of them for "
            f"validation"
        )
    training = Text(whole.content[:cut], whole.origins)
    built = build_tokenizer(tokenizer, training.content)
    # The validation text is encoded by itself, because no token may cross the cut.
    try:
        validation = encode_stream(built, whole.content[cut:])
    except UnknownCharacterError as error:
        raise _located(error, whole, cut + error.offset) from error
    return StreamSource(name, built, _encode(built, training), validation)


def _encode(tokenizer: Tokenizer, text: Text) -> NDArray[Any]:
    try:
        return encode_stream(tokenizer, text.content)
    except UnknownCharacterError as error:
        raise _located(error, text, error.offset) from error


def _located(error: UnknownCharacterError, text: Text, offset: int) -> UnknownCharacterError:
    """Return the error with the file in which it happened."""
    where, offset_in_file = text.locate(offset)
    return UnknownCharacterError(error.character, offset_in_file, where, error.hint)


def _working_directory_hint() -> str:
    return f"Paths are relative to the working directory, {Path.cwd()}."
