from __future__ import annotations

import hashlib
import lzma
import math
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from arb_ternary.errors import DataError
from arb_ternary.protocols.data import DataSource
from arb_ternary_text.data import shakespeare
from arb_ternary_text.data.entropy import bigram_entropy, unigram_entropy
from arb_ternary_text.data.shakespeare import ShakespeareConfig, build, load_text


@pytest.mark.parametrize(
    ("part", "size", "sha256"),
    [
        ("train", 4462314, "4e0fe59630441e880c0491d04d48c6e9f9aa7570ebab0a0e7926ac3bcd5d7960"),
        ("validation", 218211, "b55ae5a9806062d5de3bb0c879d1b809d29f51ba61df3e4147c5fa7d5b4b20c8"),
    ],
)
def test_the_built_in_texts_are_the_published_bytes(part, size, sha256):
    content = load_text(part).encode("ascii")
    assert len(content) == size
    assert hashlib.sha256(content).hexdigest() == sha256


def test_the_built_in_texts_use_84_ascii_characters():
    train = load_text("train")
    validation = load_text("validation")
    assert len(set(train)) == 84
    assert set(validation) <= set(train)
    assert (train + validation).isascii()


def test_validation_text_is_not_in_the_training_text():
    train = load_text("train")
    validation = load_text("validation")
    for line in ("To-morrow, and to-morrow, and to-morrow,", "If music be the food of love"):
        assert line in validation
        assert line not in train


def test_the_bytes_source_holds_the_text_as_it_is():
    source = build(ShakespeareConfig())
    assert isinstance(source, DataSource)
    assert source.name == "shakespeare"
    assert source.tokenizer.vocabulary_size == 256
    assert source.train.dtype == np.uint8
    assert source.train.tobytes() == load_text("train").encode()
    assert source.validation.tobytes() == load_text("validation").encode()


def test_tuning_holds_out_the_end_of_the_training_text():
    source = build(ShakespeareConfig(tuning=True))
    text = load_text("train").encode()
    assert source.train.tobytes() + source.validation.tobytes() == text
    assert len(source.validation) == len(text) // 20


def test_the_characters_source_decodes_to_the_text():
    source = build(ShakespeareConfig(tokenizer="characters"))
    assert source.tokenizer.vocabulary_size == 84
    assert source.train.max() == 83
    assert (
        source.tokenizer.decode(source.validation[:500].tolist()) == load_text("validation")[:500]
    )


def test_fingerprint_depends_on_the_tokenizer():
    assert build(ShakespeareConfig()).fingerprint() == build(ShakespeareConfig()).fingerprint()
    assert (
        build(ShakespeareConfig()).fingerprint()
        != build(ShakespeareConfig(tokenizer="characters")).fingerprint()
    )


def test_validation_entropies_are_the_known_values():
    content = load_text("validation").encode()
    length = len(content)
    counts = Counter(content)
    unigram = -sum(c / length * math.log(c / length) for c in counts.values())
    firsts = Counter(content[:-1])
    pairs = Counter(pairwise(content))
    bigram = -sum(c / (length - 1) * math.log(c / firsts[a]) for (a, _), c in pairs.items())
    assert round(unigram, 4) == 3.3535
    assert round(bigram, 4) == 2.4486

    ids = build(ShakespeareConfig()).validation
    assert unigram_entropy(ids) == pytest.approx(unigram, abs=1e-12)
    assert bigram_entropy(ids) == pytest.approx(bigram, abs=1e-12)


def test_damaged_package_file_names_the_reinstall_command(tmp_path, monkeypatch):
    (tmp_path / "texts").mkdir()
    packed = bytearray(lzma.compress(b"Enter a messenger." * 100))
    packed[len(packed) // 2] ^= 1
    (tmp_path / "texts" / "train.txt.xz").write_bytes(packed)
    monkeypatch.setattr(shakespeare, "files", lambda _: tmp_path)
    with pytest.raises(DataError) as caught:
        load_text("train")
    assert caught.value.what.startswith(str(tmp_path / "texts" / "train.txt.xz"))
    assert "pip install --force-reinstall" in caught.value.hint
    with pytest.raises(DataError, match=r"validation\.txt\.xz: the built-in text cannot be read"):
        load_text("validation")


def test_the_data_sources_are_built_without_torch():
    program = """
import sys
from arb_ternary_text.data import files, memmap, shakespeare, tokenizers
shakespeare.build(shakespeare.ShakespeareConfig())
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
