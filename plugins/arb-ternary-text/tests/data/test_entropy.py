from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from arb_ternary_text.data import entropy
from arb_ternary_text.data.entropy import bigram_entropy, unigram_entropy


def test_a_uniform_stream_has_the_logarithm_of_its_vocabulary():
    assert unigram_entropy(np.arange(64, dtype=np.uint8)) == pytest.approx(math.log(64), abs=1e-12)


def test_a_constant_stream_has_no_entropy():
    assert unigram_entropy(np.full(100, 7)) == 0.0
    assert bigram_entropy(np.full(100, 7)) == 0.0


def test_a_cycle_has_no_conditional_entropy():
    ids = np.tile(np.arange(5), 40)
    assert unigram_entropy(ids) == pytest.approx(math.log(5), abs=1e-12)
    assert bigram_entropy(ids) == pytest.approx(0.0, abs=1e-12)


def test_de_bruijn_sequence_has_maximal_conditional_entropy():
    # Every pair of {0, 1, 2} exactly once, closed by repeating the first token, so that
    # H(x2 | x1) = ln 3.
    ids = np.array([0, 0, 1, 0, 2, 1, 1, 2, 2, 0])
    assert len(set(pairwise(ids.tolist()))) == 9
    assert bigram_entropy(ids) == pytest.approx(math.log(3), abs=1e-12)


@given(
    st.lists(st.integers(0, 5), min_size=2, max_size=200),
    st.sampled_from([1, 1000, 2**29]),
    st.integers(1, 50),
)
def test_entropies_equal_sums_over_counters(ids, spread, chunk):
    length = len(ids)
    unigram = -sum(c / length * math.log(c / length) for c in Counter(ids).values())
    firsts = Counter(ids[:-1])
    bigram = -sum(
        c / (length - 1) * math.log(c / firsts[a]) for (a, _), c in Counter(pairwise(ids)).items()
    )
    # Entropy does not depend on which ids occur: spreading them out takes the path for large
    # vocabularies.
    stream = np.asarray(ids, dtype=np.int64) * (spread if spread * 5 < 2**31 else (2**31 - 1) // 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entropy, "_CHUNK", chunk)
        assert unigram_entropy(stream) == pytest.approx(unigram, abs=1e-10)
        assert bigram_entropy(stream) == pytest.approx(bigram, abs=1e-10)
