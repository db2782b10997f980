"""A sentencepiece model as a ``tokenizer.json`` that gives the same ids."""

from __future__ import annotations

import json
import random
import re
from base64 import b64decode
from collections.abc import Collection, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from arb_ternary.errors import ConfigError, DataError
from arb_ternary_interchange.huggingface.tokenizer_conversion import convert_tokenizer
from arb_ternary_text.data.file_tokenizers import FileTokenizer, SentencePieceTokenizer

_SPACE: Final = "\u2581"
#: A piece that stands for a byte.
_BYTE: Final = re.compile(r"<0x[0-9A-F]{2}>")

#: Texts on which both tokenizers are compared: spaces, line ends, scripts, characters that are
#: replaced, emoji and control characters.
_PROBES: Final = (
    "",
    "   ",
    "To be, or not to be: that is the question. It's 12345 o'clock!",
    "  two  spaces,   three    and four     ",
    "\ttabs\t\tand\n\nline\r\nends\r\n\r\n of \r all kinds \n ",
    "Grüße aus Köln, naïve 世界, и мир, ٣٤٥, नमस्ते, ภาษาไทย น้ำ, 한국어, שָׁלוֹם, مَدْرَسَةٌ شَدَّة",
    "ﬁne ① ½ Ⅳ ㎏ ™ ﬃ \uff46\uff55\u3000\uff57 ｱｲｳ a\u00a0b\u200bc\u3000",
    "👋🏽 👩‍👩‍👧 ❤️ 1️⃣ 🇩🇪 ☺",
    "a" * 99 + " " * 9 + "ab" * 50,
    "\x00\x01\x7f\x85\ufeff\ufffd",
)
_PIECES_PER_PROBE: Final = 24


def tokenizer_definition(tokenizer: SentencePieceTokenizer) -> str:
    """Return the text of a ``tokenizer.json`` that transformers makes of a sentencepiece model.

    Control pieces become special tokens: their letters in a text are the token.

    Raises:
        ConfigError: it does not give the same ids.
        EnvironmentProblem: transformers is not installed.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokenizer.model").write_bytes(b64decode(tokenizer.model))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        try:
            converted = convert_tokenizer(folder, "it is a sentencepiece model")
        except DataError as error:
            raise _refused(error.what) from error
    found = FileTokenizer(converted.definition)
    for text in _probes(tokenizer, found.control_tokens):
        right = tokenizer.encode(text)
        ids = found.encode(text)
        if ids != right:
            raise _refused(f"the text {text!r} would be {ids} instead of {right}")
    return converted.definition


def _refused(what: str) -> ConfigError:
    return ConfigError(
        f"tokenizer: transformers has none that gives the same ids: {what}",
        "Export without it: `-o tokenizer=false`. Most sentencepiece models of the types bpe and "
        "unigram have a form there, others do not.",
    )


def _probes(tokenizer: SentencePieceTokenizer, special: Collection[str]) -> Iterator[str]:
    """Yield texts in which no special token is spelled: :data:`_PROBES`, each piece, and all
    pieces in a random order.
    """
    texts = map(tokenizer.token_text, range(tokenizer.vocabulary_size))
    pieces = [text.replace(_SPACE, " ") for text in texts if not _BYTE.fullmatch(text)]
    spelled = re.compile("|".join(map(re.escape, special)) or "(?!)")
    pieces = [piece for piece in pieces if not spelled.search(piece)]
    mixed = random.Random(0).sample(pieces, len(pieces))
    starts = range(0, len(mixed), _PIECES_PER_PROBE)
    joined = ["".join(mixed[start : start + _PIECES_PER_PROBE]) for start in starts]
    for text in (*_PROBES, *joined, *pieces):
        if not spelled.search(text):
            yield text
