"""The data source ``tokens``: streams of ids in token files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import attrs

from arb_ternary.config.options import Condition, Rule, option, optional, positive
from arb_ternary.errors import DataError
from arb_ternary_text.data.memmap import TokenFile, open_tokens
from arb_ternary_text.data.mixture import MixtureSource
from arb_ternary_text.data.prepare import TOKENIZER, TOKENS, read_index
from arb_ternary_text.data.source import (
    DEFAULT_FRACTION,
    StreamSource,
    part,
    require_one_validation,
)
from arb_ternary_text.data.tokenizers import (
    IdTokenizer,
    Tokenizer,
    build_tokenizer,
    load_tokenizer,
)

#: Not ``characters``: these are taken from a training text, and token files have none.
_written_tokenizer: Final = Rule(
    "bytes or the path of a .json or .model file",
    lambda value: value == "bytes" or value.endswith((".json", ".model")),
    {"anyOf": [{"const": "bytes"}, {"pattern": r"\.(json|model)$"}]},
)


_shares: Final = Rule(
    "a mapping of folders to positive numbers",
    lambda value: all(math.isfinite(share) and share > 0 for share in value.values()),
    {"additionalProperties": {"type": "number", "exclusiveMinimum": 0}},
)


@attrs.frozen
class TokensConfig:
    """Options of the data source ``tokens``: streams of ids in files.

    Paths are relative to the working directory.
    """

    train: str | None = option(
        None,
        "token file for training, .bin or .npy, or a folder that `arb data prepare` has made",
    )
    mixture: Mapping[str, float] = option(
        factory=dict,
        help="instead of `train`: folders of `arb data prepare`, each with its share of the "
        "samples; the shares are relative to their sum",
        validator=_shares,
    )
    validation: str | None = option(None, "token file for validation, .bin or .npy")
    validation_fraction: float | None = option(
        None,
        f"share at the end of `train` that is kept for validation if `validation` is null (null: "
        f"{DEFAULT_FRACTION})",
        validator=optional(part),
    )
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = option(
        None,
        "integer type of .bin files; null for .npy files, which know their own",
        active_when=Condition(
            lambda options, run, plan: bool(options.raw_files), ".npy files know their own"
        ),
    )
    tokenizer: str | None = option(
        None,
        "tokenizer of the ids: bytes, or the path of a .json or .model file; null: give "
        "vocabulary_size",
        validator=optional(_written_tokenizer),
    )
    vocabulary_size: int | None = option(
        None,
        "number of ids, for token files without a tokenizer; null: the tokenizer's",
        validator=optional(positive),
    )

    def __attrs_post_init__(self) -> None:
        if (self.train is None) == (not self.mixture):
            given = "neither was given" if self.train is None else "both were given"
            raise ValueError(f"give either train or mixture: {given}")
        if self.mixture and self.validation is not None:
            raise ValueError("a mixture keeps validation_fraction of each folder for validation")
        require_one_validation(self.validation, self.validation_fraction)
        knows_ids = self.tokenizer is not None or self.vocabulary_size is not None
        if self.is_prepared:
            if knows_ids:
                raise ValueError("the folder has its tokenizer: leave out what says the ids")
            return
        if (self.tokenizer is None) == (self.vocabulary_size is None):
            given = "neither was given" if self.tokenizer is None else "both were given"
            raise ValueError(f"give either tokenizer or vocabulary_size: {given}")

    def validate_in_run(self, run: Any, planned: Any) -> list[tuple[str, str]]:
        """Require ``dtype`` for files that do not say what they hold."""
        raw = self.raw_files
        if raw and self.dtype is None:
            return [("dtype", f"must be given: {raw[0]} does not say what it holds")]
        return []

    @property
    def raw_files(self) -> list[str]:
        """The files that are nothing but integers."""
        paths = [path for path in (self.train, self.validation) if path is not None]
        return [path for path in paths if path.endswith(".bin")]

    @property
    def is_prepared(self) -> bool:
        """Whether the tokens are in folders that know their tokenizer."""
        return self.train is None or not self.train.endswith((".bin", ".npy"))


def build(config: TokensConfig) -> StreamSource | MixtureSource:
    """Build the data source of ``config``.

    Raises:
        DataError: a file is missing, empty or not a token file; its path comes first.
        EnvironmentProblem: the tokenizer needs a package that is not installed.
    """
    shares = dict(config.mixture) if config.train is None else {config.train: 1.0}
    first = next(iter(shares))
    if config.validation is not None:
        if not config.is_prepared and Path(config.validation).resolve() == Path(first).resolve():
            raise DataError(
                f"{config.validation}: the validation tokens are the training tokens",
                "Give another file, or `validation_fraction` to keep the end of this one.",
            )
        tokenizer, train = _open(config, first)
        other, validation = _open(config, config.validation)
        _require_same(tokenizer, other, first, config.validation)
        return StreamSource("tokens", tokenizer, train, validation)

    parts: list[StreamSource] = []
    for path in shares:
        tokenizer, stream = _open(config, path)
        if parts:
            _require_same(parts[0].tokenizer, tokenizer, first, path)
        cut = len(stream) - round(len(stream) * (config.validation_fraction or DEFAULT_FRACTION))
        if not 0 < cut < len(stream):
            raise DataError(
                f"{path}: {len(stream)} tokens are too few to keep a share of them for validation"
            )
        parts.append(StreamSource("tokens", tokenizer, stream[:cut], stream[cut:]))
    if len(parts) == 1:
        return parts[0]
    return MixtureSource("tokens", tuple(parts), tuple(shares.values()))


def _require_same(tokenizer: Tokenizer, other: Tokenizer, path: str, other_path: str) -> None:
    if other.to_json() != tokenizer.to_json():
        raise DataError(f"{other_path}: it has another tokenizer than {path}")


def _open(config: TokensConfig, name: str) -> tuple[Tokenizer, TokenFile]:
    """Return tokenizer and tokens of a prepared folder or of a token file."""
    path = Path(name)
    if not config.is_prepared:
        if config.tokenizer is not None:
            tokenizer = build_tokenizer(config.tokenizer)
        else:
            assert config.vocabulary_size is not None  # the config's own rule
            tokenizer = IdTokenizer(config.vocabulary_size)
        return tokenizer, open_tokens(path, tokenizer.vocabulary_size, dtype=config.dtype)
    found = read_index(path)
    tokenizer = load_tokenizer(path / TOKENIZER)
    return tokenizer, open_tokens(path / TOKENS, tokenizer.vocabulary_size, dtype=found.dtype)
