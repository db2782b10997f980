"""The built-in text: the plays and poems of Shakespeare, which are in the public domain.

The training text has 4,462,314 bytes of ASCII and 84 distinct characters. The validation text,
*Macbeth* and *Twelfth Night* (218,211 bytes), is not part of it.
"""

from __future__ import annotations

import lzma
from importlib.resources import files
from typing import Literal

import attrs

from arb_ternary.config.options import option
from arb_ternary.errors import DataError
from arb_ternary_text.data.files import Text, text_source
from arb_ternary_text.data.source import StreamSource
from arb_ternary_text.data.tokenizers import TOKENIZER_HELP, tokenizer_name


@attrs.frozen
class ShakespeareConfig:
    """Options of the data source ``shakespeare``."""

    tokenizer: str = option("bytes", TOKENIZER_HELP, validator=tokenizer_name)
    tuning: bool = option(
        False,
        "validate on the last twentieth of the training text and train on the rest, to choose "
        "settings while the validation text stays unseen",
    )


def build(config: ShakespeareConfig) -> StreamSource:
    """Build the data source of ``config``.

    Raises:
        DataError: the packaged text is damaged, or the tokenizer's file cannot be used.
        EnvironmentProblem: the tokenizer needs a package that is not installed.
    """
    content = load_text("train")
    if config.tuning:
        part = "tuning"
        cut = len(content) - len(content) // 20
        held_out = content[cut:]
        content = content[:cut]
    else:
        part = "validation"
        held_out = load_text("validation")
    training = Text(content, ((0, "shakespeare train text"),))
    validation = Text(held_out, ((0, f"shakespeare {part} text"),))
    return text_source("shakespeare", training, validation, config.tokenizer)


def load_text(part: Literal["train", "validation"]) -> str:
    """Return the training or the validation text.

    Raises:
        DataError: the packaged file is missing or damaged.
    """
    packed = files("arb_ternary_text.data") / "texts" / f"{part}.txt.xz"
    try:
        return lzma.decompress(packed.read_bytes()).decode("ascii")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise DataError(
            f"{packed}: the built-in text cannot be read: {error}",
            "pip install --force-reinstall --no-deps arb-ternary-text",
        ) from error
