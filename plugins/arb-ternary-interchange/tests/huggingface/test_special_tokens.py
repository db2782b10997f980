"""Special tokens and templates survive a folder, and are those of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from arb_ternary.errors import DataError
from arb_ternary_interchange.huggingface.tokenizer_files import read_tokenizer, write_tokenizer
from arb_ternary_text.data.byte_level import BYTE_CHARACTERS
from arb_ternary_text.data.file_tokenizers import FileTokenizer
from arb_ternary_text.data.special_tokens import SpecialTokens
from arb_ternary_text.data.tokenizers import LanguageTokenizer, encode_letters, from_json, padded_to

CONTROL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
)
Folder = Callable[..., Path]


def library() -> Any:
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(BYTE_CHARACTERS)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in CONTROL])
    return made


def special_of(state: Any) -> SpecialTokens:
    assert state is not None
    return SpecialTokens.from_json(state["special"], 300)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """Save a tokenizer by transformers and write further files beside it."""

    def make(files: dict[str, Any] | None = None, **options: Any) -> Path:
        made = transformers.PreTrainedTokenizerFast(tokenizer_object=library(), **options)
        made.save_pretrained(tmp_path)
        for name, content in (files or {}).items():
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / name).write_text(text)
        return tmp_path

    return make


@pytest.mark.parametrize(
    "special",
    [
        SpecialTokens(bos=256, eos=(257,), pad=257, unk=256, adds_bos=True),
        SpecialTokens(bos=256, eos=(259,), adds_bos=True, adds_eos=True, chat_template=TEMPLATE),
        SpecialTokens(eos=(259,), chat_template="é"),
    ],
)
def test_a_written_folder_says_the_same_to_us_and_to_transformers(
    tmp_path: Path, special: SpecialTokens
) -> None:
    tokenizer = LanguageTokenizer(FileTokenizer(library().to_str()), special)
    write_tokenizer(tmp_path, padded_to(tokenizer.to_json(), 300), 128)
    found = read_tokenizer(tmp_path, "llama")
    assert special_of(found.state) == special
    assert found.notes == ()

    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.bos_token_id == special.bos
    assert theirs.eos_token_id == special.eos[0]
    assert theirs.pad_token_id == special.pad
    assert theirs.chat_template == special.chat_template
    ids = encode_letters(tokenizer, "a é")
    before = [special.bos] if special.adds_bos else []
    after = [special.eos[0]] if special.adds_eos else []
    assert theirs("a é").input_ids == [*before, *ids, *after]


def test_ends_are_the_tokenizers_own_and_those_of_generation(folder: Folder) -> None:
    path = folder(
        {
            "generation_config.json": {"eos_token_id": [259, 257], "bos_token_id": 258},
            "config.json": {"eos_token_id": 256},
        },
        eos_token="</s>",
        chat_template=TEMPLATE,
    )
    special = special_of(read_tokenizer(path, "llama").state)
    assert special.eos == (257, 259)
    assert special.bos == 258
    assert special.chat_template == TEMPLATE
    (path / "generation_config.json").unlink()
    assert special_of(read_tokenizer(path, "llama").state).eos == (257, 256)


def test_an_end_that_is_no_id_is_named(folder: Folder) -> None:
    path = folder({"generation_config.json": {"eos_token_id": [900, 257]}})
    found = read_tokenizer(path, "llama")
    assert special_of(found.state).eos == (257,)
    assert "eos_token_id 900 is no id of the tokenizer, and is left out." in found.notes


def test_templates_by_name_and_in_older_files_are_found(folder: Folder) -> None:
    templates = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    path = folder(eos_token="</s>")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(
        json.dumps({**settings, "chat_template": templates})
    )
    found = read_tokenizer(path, "llama")
    assert special_of(found.state).chat_template == "d"
    assert "Chat templates that are left out: tool_use." in found.notes
    (path / "chat_template.json").write_text('{"chat_template": "j"}')
    assert special_of(read_tokenizer(path, "llama").state).chat_template == "j"
    (path / "chat_template.jinja").write_text("file")
    assert special_of(read_tokenizer(path, "llama").state).chat_template == "file"


def test_a_folder_without_special_tokens_has_none(folder: Folder) -> None:
    state = read_tokenizer(folder(), "llama").state
    assert state is not None
    assert state["kind"] == "file"


def test_a_damaged_file_is_named(folder: Folder) -> None:
    path = folder({"generation_config.json": "["}, eos_token="</s>")
    with pytest.raises(DataError, match=r"generation_config\.json"):
        read_tokenizer(path, "llama")


def test_a_tokenizer_without_a_token_for_letters_is_read(tmp_path: Path) -> None:
    made = Tokenizer(models.BPE({"b": 0, "c": 1}, []))
    made.save(str(tmp_path / "tokenizer.json"))
    state = read_tokenizer(tmp_path, "llama").state
    assert state is not None
    assert from_json(state).encode("bac") == [0, 1]
