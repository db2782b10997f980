"""Texts of studies: they are divided without loss, and what they are measured on is in no other
part.
"""

from __future__ import annotations

from pathlib import Path

from arb_ternary_bench.texts import divide_text, help_topics, library_source


def test_a_text_is_divided_into_eight_tenths_and_twice_one(tmp_path: Path) -> None:
    text = "".join(chr(0x100 + i) for i in range(57))
    files = divide_text(text, tmp_path, "some-")
    found = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    assert found == {"train": text[:45], "choice": text[45:51], "validation": text[51:]}
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "some-choice.txt",
        "some-train.txt",
        "some-validation.txt",
    ]


def test_the_topics_of_help_are_in_the_order_of_their_names() -> None:
    text = help_topics()
    assert (
        text.index('The "assert" statement')
        < text.index('The "while" statement')
        < text.index('The "yield" st')
    )


def test_the_source_of_the_library_is_its_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for name, content in (
        ("b.py", "second = 2"),
        ("a.py", "first = 1"),
        ("c.txt", "no"),
        ("inner/a.py", "no"),
    ):
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert library_source(folder=tmp_path) == "first = 1\nsecond = 2"
    assert library_source(12, tmp_path) == "first = 1\nse"


def test_this_pythons_library_is_a_larger_text_than_the_built_in_one() -> None:
    text = library_source()
    assert len(text) > 2_000_000
    assert (
        text.index("\nclass ArgumentParser(")
        < text.index("\nclass Fraction(")
        < text.index("\nclass TarFile(")
    )
