from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary.errors import DataError
from arb_ternary_text.data.files import TextConfig, build, find_text_files, read_text


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Make a folder ``corpus`` in the working directory."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.txt").write_bytes(b"second")
    (folder / "a.txt").write_bytes(b"first\r\n")
    (folder / "notes.md").write_bytes(b"# not read\n")
    (folder / "deep" / "c.txt").write_bytes(b"third\n")
    return folder


def _text(path):
    return read_text(find_text_files(path)).content


def test_a_file_is_read_to_the_byte(corpus):
    assert _text("corpus/a.txt") == "first\r\n"


def test_a_folder_reads_its_txt_files_in_the_order_of_names(corpus):
    assert _text("corpus") == "first\r\nsecond"


def test_suffixes_of_a_folder_are_compared_without_case(corpus):
    (corpus / "B.TXT").write_bytes(b"upper\n")
    (corpus / "c.Txt").write_bytes(b"mixed\n")
    assert _text("corpus") == "upper\nfirst\r\nsecond\nmixed\n"


def test_files_of_a_folder_that_begin_with_a_dot_are_left_out(corpus):
    (corpus / "._a.txt").write_bytes(b"\0\5\x16\7 of another system")
    (corpus / ".secret.txt").write_bytes(b"secret\n")
    (corpus / ".txt").write_bytes(b"no name\n")
    assert _text("corpus") == "first\r\nsecond"
    for name in ("a.txt", "b.txt"):
        (corpus / name).unlink()
    with pytest.raises(DataError, match=r"^corpus: the folder has no \.txt file"):
        find_text_files("corpus")
    assert _text("corpus/.secret.txt") == "secret\n"


@pytest.fixture
def log(caplog):
    """Collect what the data sources log."""
    caplog.set_level(logging.INFO, "arb_ternary.data")
    return caplog


def test_number_of_files_and_bytes_is_logged(corpus, log):
    (corpus / "a.txt").write_bytes("é".encode() * 1000)
    build(TextConfig(path="corpus"))
    assert log.messages == ["text corpus: 2 files, 2,006 bytes"]
    log.clear()
    build(TextConfig(path="corpus/*.txt", validation="corpus/deep"))
    assert log.messages == [
        "text corpus/*.txt: 2 files, 2,006 bytes",
        "text corpus/deep: 1 file, 6 bytes",
    ]


def test_nothing_is_logged_about_a_single_file(corpus, log):
    build(TextConfig(path="corpus/a.txt", validation="corpus/b.txt"))
    assert log.messages == []


def test_a_pattern_reads_its_matches_in_the_order_of_names(corpus):
    assert _text("corpus/**/*.txt") == "first\r\nsecond\nthird\n"
    assert _text(str(corpus / "*.md")) == "# not read\n"


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(corpus):
    (corpus / "x[1].txt").write_text("brackets")
    assert _text("corpus/x[1].txt") == "brackets"


def test_a_byte_order_mark_is_not_text(corpus):
    (corpus / "a.txt").write_bytes(b"\xef\xbb\xbffirst")
    assert _text("corpus/a.txt") == "first"


def test_the_end_of_the_text_is_kept_for_validation(corpus):
    (corpus / "a.txt").write_text("0123456789" * 10)
    source = build(TextConfig(path="corpus/a.txt", validation_fraction=0.25))
    assert bytes(source.train) == b"0123456789" * 7 + b"01234"
    assert bytes(source.validation) == b"56789" + b"0123456789" * 2
    assert len(build(TextConfig(path="corpus/a.txt")).validation) == 10


@given(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=10, max_size=60), st.floats(0.1, 0.9)
)
def test_the_two_parts_are_the_whole_text(tmp_path_factory, text, fraction):
    path = tmp_path_factory.mktemp("text") / "x.txt"
    path.write_bytes(text.encode())
    source = build(TextConfig(path=str(path), validation_fraction=fraction))
    kept = text.removeprefix("\ufeff")
    assert bytes(source.train) + bytes(source.validation) == kept.encode()
    assert abs(len(bytes(source.validation).decode()) - fraction * len(kept)) <= 0.5


def test_a_validation_path_is_read_whole(corpus):
    source = build(TextConfig(path="corpus", validation="corpus/deep", tokenizer="bytes"))
    assert bytes(source.train) == b"first\r\nsecond"
    assert bytes(source.validation) == b"third\n"
    assert source.name == "text"


def test_a_file_on_both_sides_is_an_error_that_names_it(corpus):
    with pytest.raises(DataError) as caught:
        build(TextConfig(path="corpus", validation="corpus/../corpus/b.txt"))
    assert caught.value.what == f"{corpus / 'b.txt'}: the file is both training and validation text"


def test_validation_and_a_fraction_exclude_each_other():
    with pytest.raises(ValueError, match="exclude each other"):
        TextConfig(path="a", validation="b", validation_fraction=0.1)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 2.0])
def test_a_fraction_leaves_something_on_both_sides(fraction):
    with pytest.raises(ValueError, match="greater than 0 and less than 1"):
        TextConfig(path="a", validation_fraction=fraction)


def test_a_text_too_short_to_cut_is_an_error(corpus):
    (corpus / "a.txt").write_text("abc")
    with pytest.raises(
        DataError, match=r"^corpus/a\.txt: 3 characters are too few to keep 0\.1 of them"
    ):
        build(TextConfig(path="corpus/a.txt"))


def test_missing_file_error_names_the_nearest_file(corpus):
    (corpus / "poems.txt").write_text("x")
    with pytest.raises(DataError) as caught:
        find_text_files("corpus/poem.txt")
    assert caught.value.what == "corpus/poem.txt: no such file or folder"
    assert "corpus/poems.txt" in caught.value.hint
    assert str(corpus.parent) in caught.value.hint
    with pytest.raises(DataError, match=r"^nowhere/at/all: no such file"):
        find_text_files("nowhere/at/all")


def test_folder_or_pattern_without_files_is_an_error(corpus):
    (corpus / "empty").mkdir()
    with pytest.raises(DataError, match=r"^corpus/empty: the folder has no \.txt file"):
        find_text_files("corpus/empty")
    with pytest.raises(DataError, match=r"^corpus/\*\.rst: no file matches"):
        find_text_files("corpus/*.rst")


def test_an_empty_text_is_an_error(corpus):
    (corpus / "a.txt").write_bytes(b"")
    with pytest.raises(DataError, match=r"^corpus/a\.txt: the text is empty"):
        build(TextConfig(path="corpus/a.txt"))


def test_text_that_is_not_utf_8_names_the_file_and_the_byte(corpus):
    (corpus / "b.txt").write_bytes("aé".encode() + b"\xff rest")
    with pytest.raises(DataError) as caught:
        build(TextConfig(path="corpus"))
    assert caught.value.what == "corpus/b.txt: not UTF-8: 0xff at byte offset 3: invalid start byte"
    assert "iconv" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "encoding", "named"),
    [
        ("naïve\n", "utf-16", "UTF-16"),
        ("plain\n", "utf-16", "UTF-16"),
        ("naïve\n", "utf-16-le", "UTF-16LE"),
        ("naïve\n", "utf-16-be", "UTF-16BE"),
        ("plain\n", "utf-16-le", "UTF-16LE"),
        ("plain\n", "utf-16-be", "UTF-16BE"),
        ("plain\n", "utf-32", "UTF-32"),
        ("A “naïve” café for 5 €\n", "cp1252", "Windows-1252"),
        ("Größe, Übermaß, façade\r\n", "latin-1", "Windows-1252"),
    ],
)
def test_text_that_is_not_utf_8_names_the_encoding(corpus, text, encoding, named):
    (corpus / "b.txt").write_bytes(text.encode(encoding))
    with pytest.raises(DataError, match=r"^corpus/b\.txt: not UTF-8") as caught:
        build(TextConfig(path="corpus"))
    assert caught.value.hint == (
        f"It seems to be {named}. Convert it first: iconv -f {named} -t UTF-8 corpus/b.txt > "
        "OTHER.txt"
    )


def test_big_endian_text_with_a_mark_names_the_encoding(corpus):
    (corpus / "b.txt").write_bytes(b"\xfe\xff" + "plain\n".encode("utf-16-be"))
    with pytest.raises(DataError) as caught:
        build(TextConfig(path="corpus"))
    assert "It seems to be UTF-16. " in caught.value.hint


@pytest.mark.parametrize(
    "content",
    [
        "Съешь же ещё этих мягких французских булок\n".encode("cp1251"),
        "いろはにほへと".encode("shift_jis"),
        b"\x81\x8d\x8f undefined in Windows-1252",
        b"\x89PNG\r\n\x1a\n and no text",
        "né".encode() + b" is damaged \xff here",
    ],
    ids=["cyrillic", "japanese", "undefined", "binary", "damaged"],
)
def test_other_encodings_are_not_named(corpus, content):
    (corpus / "b.txt").write_bytes(content)
    with pytest.raises(DataError, match=r"^corpus/b\.txt: not UTF-8") as caught:
        build(TextConfig(path="corpus"))
    assert "seems" not in caught.value.hint


@pytest.mark.parametrize("content", [b"\0", b"a\0bc", b"abc\0def\0", b"\0\0\0\0"])
def test_text_with_nuls_is_read(corpus, content):
    (corpus / "b.txt").write_bytes(content)
    assert _text("corpus/b.txt") == content.decode()


def test_a_character_cut_in_two_at_the_end_of_a_file_is_named(corpus):
    (corpus / "a.txt").write_bytes("né".encode()[:-1])
    with pytest.raises(
        DataError, match=r"a\.txt: not UTF-8: 0xc3 at byte offset 1: unexpected end of data"
    ):
        build(TextConfig(path="corpus/a.txt"))


def test_unknown_validation_character_is_located(corpus):
    (corpus / "deep" / "c.txt").write_text("first\nsecond\nfirst ß")
    (corpus / "a.txt").write_text("first \n")
    with pytest.raises(DataError) as caught:
        build(TextConfig(path="corpus", validation="corpus/deep", tokenizer="characters"))
    assert caught.value.what == (
        "corpus/deep/c.txt:3: character 'ß' (U+00DF) at offset 19 is not in the tokenizer's "
        "alphabet"
    )


def test_unknown_character_after_the_split_is_located(corpus):
    (corpus / "a.txt").write_text("abc" * 10)
    (corpus / "b.txt").write_text("aaa\nz")
    with pytest.raises(
        DataError, match=r"^corpus/b\.txt:2: character 'z' \(U\+007A\) at offset 4 "
    ):
        build(TextConfig(path="corpus", validation_fraction=0.1, tokenizer="characters"))


def test_characters_are_those_of_the_training_text_only(corpus):
    (corpus / "b.txt").write_text("banana nab")
    source = build(TextConfig(path="corpus/b.txt", validation_fraction=0.3, tokenizer="characters"))
    assert source.tokenizer.to_json()["alphabet"] == " abn"
    (corpus / "c.txt").write_text("nab")
    source = build(
        TextConfig(path="corpus/b.txt", validation="corpus/c.txt", tokenizer="characters")
    )
    assert source.tokenizer.to_json()["alphabet"] == " abn"
    assert source.validation.tolist() == [3, 1, 2]


def test_fingerprint_depends_on_content_not_on_paths(corpus):
    (corpus / "copy.txt").write_bytes((corpus / "deep" / "c.txt").read_bytes())
    first = build(TextConfig(path="corpus/deep", validation_fraction=0.5))
    second = build(TextConfig(path="corpus/copy.txt", validation_fraction=0.5))
    assert first.fingerprint() == second.fingerprint()
    other_cut = build(TextConfig(path="corpus/copy.txt", validation_fraction=0.3))
    assert other_cut.fingerprint() != first.fingerprint()
    assert np.array_equal(first.train, second.train)
