"""How a model reads conversations: tokens by what they are, and statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from attrs import frozen

from arb_ternary_text.chat.answers import EncodedConversation
from arb_ternary_text.chat.conversations import Conversation
from arb_ternary_text.chat.packing import Documents, TooLong, pack
from arb_ternary_text.chat.source import content_hash
from arb_ternary_text.data.file_tokenizers import FileTokenizer
from arb_ternary_text.data.tokenizers import Tokenizer, base_tokenizer


@frozen
class Span:
    """Tokens of one kind that follow one another.

    Attributes:
        text: their text.
        control: whether they are control tokens.
        learned: whether the model learns to write them.
    """

    text: str
    control: bool
    learned: bool


def spans(tokenizer: Tokenizer, encoded: EncodedConversation) -> Iterator[Span]:
    """Yield a conversation as spans of tokens of one kind."""
    base = base_tokenizer(tokenizer)
    control = set(base.control_tokens.values()) if isinstance(base, FileTokenizer) else set()
    kinds = [
        (token in control, learned)
        for token, learned in zip(encoded.ids, encoded.learned, strict=True)
    ]
    place = 0
    for (is_control, learned), group in groupby(kinds):
        count = len(list(group))
        ids = encoded.ids[place : place + count]
        place += count
        yield Span(tokenizer.decode(ids), is_control, learned)


@frozen
class Statistics:
    """Counts of conversations as a model reads them.

    Attributes:
        conversations: number of conversations.
        duplicates: conversations that are equal to an earlier one.
        tokens: tokens of all of them.
        learned: tokens that the model learns to write.
        longest: tokens of the longest one.
        rows: rows of ``row_tokens`` tokens that they are packed into.
        row_tokens: tokens of a row.
        cut: tokens that are in no row.
    """

    conversations: int
    duplicates: int
    tokens: int
    learned: int
    longest: int
    rows: int
    row_tokens: int
    cut: int

    def table(self) -> list[tuple[str, str]]:
        """Return the counts as rows of text."""
        return [
            ("conversations", f"{self.conversations:,}"),
            ("duplicates", f"{self.duplicates:,}"),
            ("tokens", f"{self.tokens:,}"),
            ("learned tokens", f"{self.learned:,} ({self.learned / self.tokens:.1%})"),
            ("longest conversation", f"{self.longest:,} tokens"),
            (f"rows of {self.row_tokens:,} tokens", f"{self.rows:,}"),
            ("tokens cut off", f"{self.cut:,} ({self.cut / self.tokens:.1%})"),
        ]


def measured(
    conversations: Sequence[Conversation],
    encoded: Sequence[EncodedConversation],
    vocabulary_size: int,
    row_tokens: int,
    too_long: TooLong,
) -> Statistics:
    """Return the statistics of conversations in rows of ``row_tokens`` tokens.

    Args:
        conversations: the conversations.
        encoded: the same as tokens.
        vocabulary_size: number of ids.
        row_tokens: tokens of a row.
        too_long: what becomes of longer conversations; see ``pack``.

    Raises:
        DataError: nothing is left to learn in such rows.
    """
    different = {content_hash(each) for each in conversations}
    documents = Documents.join([(each.ids, each.learned) for each in encoded], vocabulary_size)
    rows = pack(documents, row_tokens, too_long, "the conversations")
    return Statistics(
        conversations=len(conversations),
        duplicates=len(conversations) - len(different),
        tokens=len(documents.ids),
        learned=int(documents.learned.sum()),
        longest=documents.longest,
        rows=len(rows),
        row_tokens=row_tokens,
        cut=rows.lost,
    )
