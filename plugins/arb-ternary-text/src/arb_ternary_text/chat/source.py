"""The data source ``chat``: conversations in files, packed into rows."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
import numpy as np
from numpy.typing import NDArray

from arb_ternary.config.options import Rule, option, optional
from arb_ternary.errors import DataError
from arb_ternary.protocols.data import Batch, BatchRequest
from arb_ternary_text.chat.answers import EncodedConversation, Turns, encode_conversation
from arb_ternary_text.chat.conversations import (
    COLUMNS,
    Conversation,
    OnBadLine,
    find_conversation_files,
    read_conversations,
)
from arb_ternary_text.chat.packing import Documents, Rows, TooLong, pack
from arb_ternary_text.chat.template import (
    ChatTemplate,
    RefusedConversationError,
    chat_template,
)
from arb_ternary_text.data.file_tokenizers import FileTokenizer
from arb_ternary_text.data.files import read_utf8, require_other_files
from arb_ternary_text.data.sampler import Sampler
from arb_ternary_text.data.source import DEFAULT_FRACTION, part, require_one_validation
from arb_ternary_text.data.tokenizers import (
    LanguageTokenizer,
    Tokenizer,
    base_tokenizer,
    build_tokenizer,
    special_tokens,
)

if TYPE_CHECKING:
    from arb_ternary_text.data.loader import SampledBatches

#: The program's log, which the command line shows.
_log: Final = logging.getLogger("arb_ternary.data")

#: Key of the tokens that are learned, in the extras of a batch.
LEARNED: Final = "learned"
#: Roles whose messages can be learned.
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")

_tokenizer_file: Final = Rule(
    "the path of a .json or .model file, or bytes",
    lambda value: value == "bytes" or value.endswith((".json", ".model")),
    {"anyOf": [{"const": "bytes"}, {"pattern": r"\.(json|model)$"}]},
)
_are_roles: Final = Rule(
    f"one or more of {', '.join(_ROLES)}",
    lambda value: bool(value) and set(value) <= set(_ROLES),
    {"items": {"enum": list(_ROLES)}, "minItems": 1},
)
_are_columns: Final = Rule(
    f"a mapping of {', '.join(COLUMNS)} to keys of the files",
    lambda value: set(value) <= set(COLUMNS),
    {"propertyNames": {"enum": list(COLUMNS)}},
)


def _is_date(value: str) -> bool:
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return False
    return True


_date: Final = Rule("a date, such as 2026-01-31", _is_date, {"type": "string"})


@attrs.frozen
class ChatConfig:
    """Options of the data source ``chat``: conversations in files.

    Paths are relative to the working directory.
    """

    train: str = option(
        help="conversations: a .jsonl, .json, .csv or .parquet file, a folder of them or a glob "
        "pattern"
    )
    tokenizer: str = option(
        help="the tokenizer.json of a run, which knows the chat template; or another tokenizer's "
        ".json or .model file, or bytes",
        validator=_tokenizer_file,
    )
    validation: str | None = option(
        None, "conversations for validation: a file, a folder or a glob pattern"
    )
    validation_fraction: float | None = option(
        None,
        f"share of the conversations that is kept for validation if `validation` is null, equal "
        f"ones on one side (null: {DEFAULT_FRACTION})",
        validator=optional(part),
    )
    template: str | None = option(
        None, "file with the chat template; null: the one that the tokenizer knows"
    )
    date: str = option(
        "2026-01-01",
        "the day that templates write which tell the date; fixed, so that a run can be continued "
        "on another day",
        validator=_date,
    )
    columns: Mapping[str, str] = option(
        factory=dict,
        help="keys of the files for messages, role, content, prompt, completion, text, system, "
        "instruction, input and output, where they have other names",
        validator=_are_columns,
    )
    on_bad_line: OnBadLine = option(
        "error", "what becomes of a line that is wrong: error, or skip, and say how many"
    )
    too_long: TooLong = option(
        "cut",
        "what becomes of a conversation longer than a row: cut keeps its beginning, split makes "
        "several rows of it, drop leaves it out",
    )
    turns: Turns = option("all", "which turns are learned: all, or the last of a conversation")
    roles: list[str] = option(
        factory=lambda: ["assistant"],
        help="whose messages are learned: assistant, also system, developer, user or tool",
        validator=_are_roles,
    )

    def __attrs_post_init__(self) -> None:
        require_one_validation(self.validation, self.validation_fraction)

    def validate_in_run(self, run: Any, planned: Any) -> list[tuple[str, str]]:
        """Require the masking strategy that leaves out what is not learned."""
        if run.masking.name != "answers":
            return [
                (
                    "",
                    f"needs masking: answers; {run.masking.name} would also learn questions and "
                    f"the padding of rows",
                )
            ]
        return []


@attrs.frozen(eq=False)
class ChatSource:
    """Conversations as documents of tokens.

    Attributes:
        name: name of the source in listings and errors.
        tokenizer: turns text into the ids of the documents.
        train: training documents.
        validation: validation documents.
        too_long: what becomes of documents that are longer than a row.
    """

    name: str
    tokenizer: Tokenizer
    train: Documents
    validation: Documents
    too_long: TooLong
    _packed: dict[tuple[str, int], Rows] = attrs.field(factory=dict, init=False, repr=False)

    def fingerprint(self) -> str:
        """Return the SHA-256 in hexadecimal of the documents, of what is learned, and of the
        tokenizer.

        It does not depend on paths.
        """
        tokenizer = json.dumps(self.tokenizer.to_json(), sort_keys=True)
        hasher = hashlib.sha256(f"{self.too_long}\n{tokenizer}".encode())
        for documents in (self.train, self.validation):
            for array in (documents.ids, documents.learned, documents.starts):
                hasher.update(f"\n{array.dtype.str} {len(array)}\n".encode())
                hasher.update(np.ascontiguousarray(array).data)
        return hasher.hexdigest()

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids."""
        return self.tokenizer.vocabulary_size

    def rows(self, block_size: int, *, training: bool = True) -> Rows:
        """Return how the documents are packed into rows of ``block_size`` predictions.

        Raises:
            DataError: nothing is left to learn in such rows.
        """
        name = "training" if training else "validation"
        key = (name, block_size)
        if key not in self._packed:
            documents = self.train if training else self.validation
            rows = pack(documents, block_size + 1, self.too_long, f"the {name} conversations")
            self._packed[key] = rows
            _log_rows(name, documents, rows)
        return self._packed[key]

    def batches(self, request: BatchRequest) -> SampledBatches:
        """Return batches of training rows, with the extra ``learned``.

        Raises:
            DataError: nothing is left to learn in such rows, or the order is sequential.
        """
        from arb_ternary_text.data.loader import SampledBatches

        if request.order == "sequential":
            raise DataError(
                f"data {self.name}: rows of conversations do not continue each other",
                "Set preserve_state: false.",
            )
        rows = self.rows(request.block_size)
        sampler = Sampler(
            len(rows), request.batch_size, request.seed, name="the rows of conversations"
        )
        return SampledBatches(
            sampler,
            lambda indices_B: self.read(rows, indices_B),
            workers=request.workers,
            pin_memory=request.pin_memory,
        )

    def samples_per_epoch(self, block_size: int) -> int:
        """Return the number of training rows."""
        return len(self.rows(block_size))

    def held_out(self, batch_size: int, block_size: int, limit: int | None) -> Iterator[Batch]:
        """Yield batches of validation rows, each row once."""
        from arb_ternary_text.data.loader import evaluation_indices

        rows = self.rows(block_size, training=False)
        indices = evaluation_indices(len(rows), batch_size, limit)
        return (self.read(rows, indices_B, training=False) for indices_B in indices)

    def read(self, rows: Rows, indices_B: NDArray[np.int64], *, training: bool = True) -> Batch:
        """Return rows as a batch: ids int64 ``[B, S + 1]``, and bool ``learned`` of that shape.

        Padding is not learned. Neither is the first token of a document.
        """
        import torch

        documents = self.train if training else self.validation
        special = special_tokens(self.tokenizer)
        padding = special.pad if special.pad is not None else next(iter(special.eos), 0)
        tokens = np.full((len(indices_B), rows.length), padding, dtype=np.int64)
        learned = np.zeros((len(indices_B), rows.length), dtype=bool)
        for row, index in enumerate(indices_B.tolist()):
            place = 0
            for piece in range(rows.first[index], rows.first[index + 1]):
                start = int(rows.starts[piece])
                size = int(rows.lengths[piece])
                tokens[row, place : place + size] = documents.ids[start : start + size]
                learned[row, place + 1 : place + size] = documents.learned[start + 1 : start + size]
                place += size
        extras = {LEARNED: torch.from_numpy(learned)}
        return Batch(torch.from_numpy(tokens), torch.from_numpy(indices_B.copy()), extras)

    def attachments(self) -> Mapping[str, Any]:
        """Return the tokenizer as ``from_json`` reads it."""
        return {"tokenizer": self.tokenizer.to_json()}


def build(config: ChatConfig) -> ChatSource:
    """Build the data source of ``config``.

    Raises:
        DataError: a file is missing or empty, a line is wrong, or the template does not write the
            conversations; file and line come first.
        EnvironmentProblem: the tokenizer, the template or a file needs a package that is not
            installed.
    """
    tokenizer = build_tokenizer(config.tokenizer)
    if config.template is not None:
        tokenizer = _with_template(tokenizer, read_utf8(Path(config.template)))
    if config.validation is not None:
        require_other_files(
            find_conversation_files(config.train),
            find_conversation_files(config.validation),
            "has both training and validation conversations",
            f"`train` is {config.train} and `validation` is {config.validation}",
        )
    train: Sequence[Conversation] = _read(config.train, config)
    validation: Sequence[Conversation]
    if config.validation is None:
        share = config.validation_fraction or DEFAULT_FRACTION
        train, validation = split_conversations(train, share, config.train)
    else:
        validation = _read(config.validation, config)
    template = None
    if any(each.messages for each in (*train, *validation)):
        name = f"{config.template or config.tokenizer}: the chat template"
        template = chat_template(tokenizer, name, datetime.fromisoformat(config.date))
    return ChatSource(
        "chat",
        tokenizer,
        _encode_all(tokenizer, template, train, config, "training"),
        _encode_all(tokenizer, template, validation, config, "validation"),
        config.too_long,
    )


def split_conversations(
    conversations: Sequence[Conversation], share: float, path: str
) -> tuple[list[Conversation], list[Conversation]]:
    """Return the conversations for training, and a share of them for validation.

    Those with the smallest hashes of their content are kept for validation, so that the choice
    does not depend on the order, and equal conversations are on one side.

    Args:
        conversations: the conversations.
        share: share for validation, between 0 and 1.
        path: name of the conversations in errors.

    Raises:
        DataError: there are too few different conversations.
    """
    hashes = [content_hash(each) for each in conversations]
    different = sorted(set(hashes))
    cut = round(len(different) * share)
    if not 0 < cut < len(different):
        raise DataError(
            f"{path}: {len(different)} different conversations are too few to keep {share:g} of "
            f"them for validation",
            "Add conversations, change validation_fraction, or give `validation`.",
        )
    kept = set(different[:cut])
    train = [each for each, key in zip(conversations, hashes, strict=True) if key not in kept]
    validation = [each for each, key in zip(conversations, hashes, strict=True) if key in kept]
    return train, validation


def content_hash(conversation: Conversation) -> str:
    """Return the SHA-256 in hexadecimal of what a conversation says, wherever it was read."""
    content = [conversation.messages, conversation.text]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _with_template(tokenizer: Tokenizer, source: str) -> Tokenizer:
    special = attrs.evolve(special_tokens(tokenizer), chat_template=source)
    inner = tokenizer.inner if isinstance(tokenizer, LanguageTokenizer) else tokenizer
    return LanguageTokenizer(inner, special)


def _read(path: str, config: ChatConfig) -> Sequence[Conversation]:
    found = read_conversations(path, config.columns, config.on_bad_line)
    _log_skipped(path, found.skipped)
    return found.items


def _encode_all(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    conversations: Sequence[Conversation],
    config: ChatConfig,
    name: str,
) -> Documents:
    """Return the conversations as documents."""
    encoded: list[EncodedConversation] = []
    skipped: list[str] = []
    for conversation in conversations:
        try:
            found = encode_conversation(
                tokenizer, template, conversation, turns=config.turns, roles=config.roles
            )
        except RefusedConversationError as error:
            refused = DataError(f"{conversation.origin}: {error.what}", error.hint)
            if config.on_bad_line == "error":
                raise refused from error
            skipped.append(refused.what)
        except DataError as error:
            raise DataError(f"{conversation.origin}: {error.what}", error.hint) from error
        else:
            encoded.append(found)
    _log_skipped(name, skipped)
    _log_spelled(tokenizer, conversations, name)
    if not encoded:
        raise DataError(f"the {name} conversations: the chat template refuses all of them")
    documents = Documents.join(
        [(each.ids, each.learned) for each in encoded], tokenizer.vocabulary_size
    )
    _log.info(
        "chat: %d %s conversations, %s tokens, the longest has %s",
        *(len(documents), name, f"{len(documents.ids):,}", f"{documents.longest:,}"),
    )
    return documents


def _log_skipped(name: str, skipped: Sequence[str]) -> None:
    if skipped:
        _log.warning("chat %s: %d skipped, the first: %s", name, len(skipped), skipped[0])


def _log_spelled(tokenizer: Tokenizer, conversations: Sequence[Conversation], name: str) -> None:
    """Warn of texts that somebody may have written by a template of their own."""
    base = base_tokenizer(tokenizer)
    control = list(base.control_tokens) if isinstance(base, FileTokenizer) else []
    texts = [each for each in conversations if each.text is not None]
    spelled = [each for each in texts if any(token in str(each.text) for token in control)]
    if spelled:
        _log.warning(
            "chat: %d %s texts spell control tokens, which stay letters; write conversations as "
            "messages. The first: %s",
            *(len(spelled), name, spelled[0].origin),
        )


def _log_rows(name: str, documents: Documents, rows: Rows) -> None:
    tokens = len(documents.ids)
    learned = int(documents.learned.sum())
    _log.info(
        "chat: %s %s rows of %d tokens, %.1f %% padding; lost: %.2f %% of the tokens, %.2f %% of "
        "those that are learned",
        f"{len(rows):,}",
        name,
        rows.length,
        100 * (1 - rows.tokens / (len(rows) * rows.length)),
        100 * rows.lost / tokens,
        100 * rows.lost_learned / max(learned, 1),
    )
