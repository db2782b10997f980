"""Documents become a folder of tokens, whole or to be continued, and runs read it."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arb_ternary.errors import DataError, UsageProblem
from arb_ternary_text.data import file_tokenizers
from arb_ternary_text.data import prepare as module
from arb_ternary_text.data.documents import Corpus, Place, find_documents
from arb_ternary_text.data.file_tokenizers import FileTokenizer
from arb_ternary_text.data.memmap import open_tokens
from arb_ternary_text.data.prepare import TOKENS, prepare, read_index
from arb_ternary_text.data.special_tokens import SpecialTokens
from arb_ternary_text.data.tokenizers import (
    ByteTokenizer,
    LanguageTokenizer,
    PaddedTokenizer,
    load_tokenizer,
)
from arb_ternary_text.data.tokens import TokensConfig, build
from arb_ternary_text.data.train_tokenizer import CHATML, train_bpe
from arb_ternary_train.directory import write_json

TEXTS = ["first", "second é", "first", "  ", "third\nline"]
BYTES = LanguageTokenizer(
    PaddedTokenizer(ByteTokenizer(), 258), SpecialTokens(bos=256, eos=(257,), adds_bos=True)
)
EXPECTED = [256, *b"first", 257, 256, *"second é".encode(), 257, 256, *b"third\nline", 257]
Written = Callable[[str], Path]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Write the texts in a format and return the file."""

    def write(ending: str) -> Path:
        path = tmp_path / f"texts{ending}"
        if ending == ".txt":
            path.write_text("<SEP>".join(TEXTS))
        elif ending == ".jsonl":
            path.write_text("".join(json.dumps({"text": text}) + "\n\n" for text in TEXTS))
        else:
            pyarrow = pytest.importorskip("pyarrow")
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pyarrow.table({"text": [*TEXTS, None]}), path)
        return path

    return write


def ids(folder: Path) -> list[int]:
    return open_tokens(folder / TOKENS, 258, dtype="uint16").tolist()


@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".parquet"])
def test_every_format_gives_the_same_tokens(written: Written, tmp_path: Path, ending: str) -> None:
    corpus = Corpus((written(ending),), separator="<SEP>")
    done = prepare(corpus, BYTES, tmp_path / "out")
    assert ids(tmp_path / "out") == EXPECTED
    assert (done.documents, done.duplicates, done.tokens) == (3, 1, len(EXPECTED))
    assert done.longest == len("third\nline") + 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "tokenizer.json",
        "tokens.bin",
        "tokens.json",
    ]
    assert prepare(corpus, BYTES, tmp_path / "out") == done


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.text("ab|é", max_size=12), min_size=1, max_size=8),
    st.integers(1, 9),
)
def test_texts_are_split_at_separators_wherever_chunks_end(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], chunk: int
) -> None:
    path = tmp_path_factory.mktemp("chunks") / "a.txt"
    content = "||".join(texts)
    path.write_text(content, newline="")
    expected = [part for part in content.split("||") if part.strip()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("arb_ternary_text.data.documents._CHUNK", chunk)
        corpus = Corpus((path,), separator="||")
        found = list(corpus.documents(Place()))
        assert [document.text for document in found] == expected
        for number, document in enumerate(found):
            rest = [each.text for each in corpus.documents(document.end)]
            assert rest == expected[number + 1 :]


def test_an_interrupted_preparation_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BATCH", 40)
    path = tmp_path / "many.jsonl"
    texts = [f"document {number % 37} of many" for number in range(100)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus = Corpus((path,))
    whole = prepare(corpus, BYTES, tmp_path / "whole", segment_tokens=100)
    assert whole.documents == 37
    assert len(whole.segments) > 5
    folder = tmp_path / "killed"
    for stop_after in (1, 2, 3, 5, 8, 13, 21):
        calls = 0

        def stop(_: int, after: int = stop_after) -> None:
            nonlocal calls
            calls += 1
            if calls > after:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            prepare(corpus, BYTES, folder, observe=stop, segment_tokens=100)
    assert prepare(corpus, BYTES, folder, segment_tokens=100) == whole
    assert (folder / TOKENS).read_bytes() == (tmp_path / "whole" / TOKENS).read_bytes()


def test_segments_have_the_checksums_of_their_bytes(written: Written, tmp_path: Path) -> None:
    prepare(Corpus((written(".jsonl"),)), BYTES, tmp_path / "out")
    (segment,) = read_index(tmp_path / "out").segments
    content = np.array(EXPECTED, dtype="<u2").tobytes()
    assert segment.sha256 == hashlib.sha256(content).hexdigest()
    (tmp_path / "out" / TOKENS).write_bytes(content[:-2])
    with pytest.raises(DataError, match=r"tokens\.json says"):
        read_index(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', r"a\.jsonl:2: there is no text under 'text'"),
        ("a.jsonl", b'{"text": "x"}\n{\n', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"a\.jsonl:1: not UTF-8"),
        ("a.txt", b"good\xff", r"a\.txt, byte 0: not UTF-8"),
        ("a.txt", b" \n", "there is no document with text"),
        ("a.parquet", b"PAR1", "not a readable Parquet file"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare(Corpus((tmp_path / name,)), BYTES, tmp_path / "out")


def test_a_document_without_a_bound_needs_a_separator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("arb_ternary_text.data.documents.LARGEST_DOCUMENT", 100)
    monkeypatch.setattr("arb_ternary_text.data.documents._CHUNK", 64)
    (tmp_path / "a.txt").write_text("x" * 500)
    with pytest.raises(DataError, match="a document of more than") as caught:
        prepare(Corpus((tmp_path / "a.txt",)), BYTES, tmp_path / "out")
    assert "--separator" in caught.value.hint


def test_another_preparation_does_not_touch_a_folder(written: Written, tmp_path: Path) -> None:
    corpus = Corpus((written(".jsonl"),))
    prepare(corpus, BYTES, tmp_path / "out")
    with pytest.raises(UsageProblem, match="another tokenizer"):
        prepare(corpus, ByteTokenizer(), tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("kept")
    with pytest.raises(UsageProblem, match="there are other files in it"):
        prepare(corpus, BYTES, tmp_path / "mine")
    assert (tmp_path / "mine" / "notes").read_text() == "kept"


def test_files_are_found_in_folders_and_by_patterns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b/2.txt", "b/1.JSONL", "b/.hidden.txt", "b/x.md", "a.txt"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("x")
    names = [str(path.name) for path in find_documents(["b", "*.txt", "a.txt"])]
    assert names == ["1.JSONL", "2.txt", "a.txt"]
    with pytest.raises(DataError, match="no file ends in"):
        find_documents(["nowhere"])
    with pytest.raises(DataError, match="ends in"):
        find_documents(["b/x.md"])


def test_a_run_reads_a_prepared_folder_and_a_mixture(tmp_path: Path) -> None:
    from arb_ternary.protocols.data import BatchRequest

    folders = []
    for number, letter in enumerate("abc"):
        path = tmp_path / f"{letter}.txt"
        path.write_text(letter * 400 * (number + 1))
        prepare(Corpus((path,)), BYTES, tmp_path / letter)
        folders.append(str(tmp_path / letter))
    one = build(TokensConfig(train=folders[0]))
    assert one.vocabulary_size == 258
    shares = {folders[0]: 5.0, folders[1]: 3.0, folders[2]: 2.0}
    source = build(TokensConfig(mixture=shares))
    assert (
        source.fingerprint() != build(TokensConfig(mixture={**shares, folders[0]: 4})).fingerprint()
    )
    request = BatchRequest(batch_size=4, block_size=8, seed=3)
    epoch = source.samples_per_epoch(8)
    batches = source.batches(request)
    seen = [next(batches) for _ in range(epoch // 4)]
    letters = np.concatenate([batch.data[:, 4].numpy() for batch in seen])
    for letter, share in zip(b"abc", (0.5, 0.3, 0.2), strict=True):
        assert abs((letters == letter).sum() - share * epoch) <= 5
    # Each stream goes through all of its windows before one comes again.
    numbers = np.concatenate([batch.sample_ids.numpy() for batch in seen])
    of_c = numbers[letters == ord("c")]
    assert len(set(of_c.tolist())) == len(of_c)
    again = source.batches(request)
    again.load_state_dict({**batches.state_dict(), "cursor": 3})
    assert (next(again).data == seen[3].data).all()
    held_out = list(source.held_out(4, 8, None))
    assert sum(len(batch.data) for batch in held_out) > 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "neither was given"),
        ({"train": "a", "mixture": {"b": 1.0}}, "both were given"),
        ({"mixture": {"b": 1.0}, "validation": "c"}, "a mixture keeps"),
        ({"train": "a", "vocabulary_size": 3}, "the folder has its tokenizer"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TokensConfig(**options)


def test_an_incomplete_folder_is_no_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no tokens\.json"):
        build(TokensConfig(train=str(tmp_path)))
    (tmp_path / "progress.json").write_text("{}")
    with pytest.raises(DataError, match="not complete"):
        build(TokensConfig(train=str(tmp_path)))


def test_a_trained_tokenizer_merges_what_is_frequent(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the cat and the dog and the cow " * 50)
    corpus = Corpus((tmp_path / "a.txt",))
    tokenizer = train_bpe(corpus, 300, ["<|end|>", "<|more|>"])
    path = tmp_path / "tokenizer.json"
    write_json(path, tokenizer.to_json())
    loaded = load_tokenizer(path)
    assert loaded.to_json() == tokenizer.to_json()
    assert loaded.vocabulary_size <= 300
    assert len(loaded.encode(" the")) == 1
    for text in ("Grüße → 🙂", "<|end|>"):
        assert loaded.decode(loaded.encode(text)) == text
    assert loaded.encode("<|end|>") == [0]
    chat = train_bpe(corpus, 300, chat=True)
    assert chat.encode("<|im_start|>") == [1]
    assert chat.special.eos == (2, 0)
    assert chat.special.chat_template == CHATML
    with pytest.raises(UsageProblem, match="is less than 256 bytes"):
        train_bpe(corpus, 257, ["<|end|>", "<|more|>"])


def test_ids_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    # Parts of a few words, so that some documents have many of them.
    monkeypatch.setattr(file_tokenizers, "_PART", 200)
    monkeypatch.setattr(file_tokenizers, "_MARGIN", 60)
    draw = random.Random(0)
    words = [
        "cat",
        "don't",
        "naïve",
        "🙂🙂",
        "12345",
        "\n\n",
        "   ",
        "<|endoftext|>",
        "世界",
        "a" * 30,
    ]
    texts = [
        f"{number} " + " ".join(draw.choice(words) for _ in range(2 ** draw.randrange(9)))
        for number in range(60)
    ]
    texts.append("x" * 1000)  # no place where parts could agree
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = train_bpe(Corpus((path,)), 330)
    prepare(Corpus((path,)), tokenizer, tmp_path / "out")
    definition = tokenizer.to_json()["tokenizer"]["definition"]
    (tmp_path / "tokenizer.json").write_text(definition)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), split_special_tokens=True
    )
    expected = [[*theirs(text, add_special_tokens=False).input_ids, 0] for text in texts]
    assert ids(tmp_path / "out") == [token for each in expected for token in each]


def test_long_documents_are_encoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    # A prefix at the beginning of what is encoded, as sentencepiece's definitions have it.
    library.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    text = "a cat and another cat sat, " * 400
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=60, show_progress=False)
    library.train_from_iterator([text], trainer)
    monkeypatch.setattr(file_tokenizers, "_PART", 500)
    monkeypatch.setattr(file_tokenizers, "_MARGIN", 100)
    lengths = []
    encode = file_tokenizers._encode_offsets

    def recorded(used: Any, part: str) -> Any:
        lengths.append(len(part))
        return encode(used, part)

    monkeypatch.setattr(file_tokenizers, "_encode_offsets", recorded)
    found = list(FileTokenizer(library.to_str()).encode_letters_of(["short", text]))
    assert [each.tolist() for each in found] == [
        library.encode(each).ids for each in ("short", text)
    ]
    assert len(lengths) > 15
    assert max(lengths) <= 700


def test_a_row_group_of_parquet_is_read_page_by_page(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = [random.Random(number).randbytes(2000).hex() for number in range(5000)]
    path = tmp_path / "a.parquet"
    table = pyarrow.table({"text": texts})
    parquet.write_table(table, path, use_dictionary=False, data_page_size=1 << 16)
    del table
    before = pyarrow.total_allocated_bytes()
    documents = Corpus((path,)).documents(Place())
    found = []
    for text in texts:
        assert next(documents).text == text
        found.append(pyarrow.total_allocated_bytes() - before)
    # The row group has 20 MB.
    assert max(found) < 6 << 20


PREPARE = """
import os, signal, sys
from pathlib import Path
from arb_ternary_text.data import prepare as module
from arb_ternary_text.data.documents import Corpus
from arb_ternary_text.data.tokenizers import ByteTokenizer

module._BATCH = 2000
calls = 0

def observe(_):
    global calls
    calls += 1
    if calls == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

corpus = Corpus((Path(sys.argv[1]),))
module.prepare(corpus, ByteTokenizer(), Path(sys.argv[2]), observe=observe, segment_tokens=5000)
"""


def test_after_sigkill_the_same_command_goes_on_to_the_same_files(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    texts = [f"document {number % 700}" for number in range(2000)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    folder = tmp_path / "killed"

    def run(kill_at: int) -> int:
        command = [sys.executable, "-c", PREPARE, str(path), str(folder), str(kill_at)]
        return subprocess.run(command, check=False).returncode

    assert run(4) == -signal.SIGKILL
    assert len(json.loads((folder / "progress.json").read_text())["segments"]) == 1
    assert run(0) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BATCH", 2000)
        prepare(Corpus((path,)), ByteTokenizer(), tmp_path / "whole", segment_tokens=5000)
    names = sorted(each.name for each in folder.iterdir())
    assert names == ["tokenizer.json", "tokens.bin", "tokens.json"]
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_memory_does_not_grow_with_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BATCH", 1 << 15)
    monkeypatch.setattr("arb_ternary_text.data.documents._CHUNK", 1 << 15)

    def peak(kilobytes: int) -> int:
        path = tmp_path / f"{kilobytes}.txt"
        path.write_text("|".join(f"{number:1000}" for number in range(kilobytes)))
        corpus = Corpus((path,), separator="|")
        tracemalloc.start()
        prepare(corpus, ByteTokenizer(), tmp_path / str(kilobytes), segment_tokens=1 << 17)
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return highest

    small = peak(500)
    assert peak(4000) < small + 100_000
