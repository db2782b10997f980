"""Train a tokenizer on documents: byte-level BPE, by the package ``tokenizers``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Final

from arb_ternary.errors import EnvironmentProblem, UsageProblem
from arb_ternary.plugins.discovery import install_command
from arb_ternary_text.data.documents import Corpus, Place
from arb_ternary_text.data.file_tokenizers import FileTokenizer
from arb_ternary_text.data.special_tokens import SpecialTokens
from arb_ternary_text.data.tokenizers import LanguageTokenizer

#: Control tokens of ChatML: the end of a text, and the beginning and end of a message.
CHAT_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
#: The chat template ChatML.
CHATML: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_bpe(
    corpus: Corpus,
    vocabulary_size: int,
    special: Sequence[str] = ("<|endoftext|>",),
    *,
    chat: bool = False,
) -> LanguageTokenizer:
    """Return a byte-level BPE (Sennrich et al., 2016) whose merges are learned from ``corpus``.

    It splits text as GPT-2 does, can write any text, and has the control tokens ``special`` as its
    first ids, of which the first ends documents.

    Args:
        corpus: the documents.
        vocabulary_size: largest number of ids: 256 bytes, the control tokens and merges.
        special: texts of the control tokens, at least one.
        chat: add the control tokens of ChatML that are missing, and its template; a message's end
            ends an answer.

    Raises:
        UsageProblem: there is no room for bytes and control tokens, or one occurs twice.
        EnvironmentProblem: the package ``tokenizers`` is not installed.
    """
    if chat:
        special = [*special, *(token for token in CHAT_TOKENS if token not in special)]
    if len(set(special)) != len(special) or not all(special):
        raise UsageProblem("--special: control tokens must be different, and not empty")
    if vocabulary_size < 256 + len(special):
        raise UsageProblem(
            f"--vocabulary-size: {vocabulary_size} is less than 256 bytes and {len(special)} "
            f"control tokens"
        )
    try:
        library = import_module("tokenizers")
    except ImportError as error:
        raise EnvironmentProblem(
            "training a tokenizer needs the package `tokenizers`, which is not installed",
            install_command("arb-ternary-text[tokenizers]"),
        ) from error
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(special),
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (document.text for document in corpus.documents(Place()))
    tokenizer.train_from_iterator(texts, trainer)
    known = SpecialTokens(eos=(0,), pad=0)
    if chat:
        end = tokenizer.token_to_id(CHAT_TOKENS[-1])
        known = SpecialTokens(eos=(end, 0), pad=0, chat_template=CHATML)
    return LanguageTokenizer(FileTokenizer(tokenizer.to_str()), known)
