"""A set of digests on disk is a set, and memory does not grow with it."""

from __future__ import annotations

import hashlib
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arb_ternary_text.data import digests as module
from arb_ternary_text.data.digests import DIGEST_BYTES, DigestSet

#: Few different digests, so that many occur twice; zero bytes at the end count.
DIGESTS = st.binary(max_size=2).map(lambda start: start.ljust(DIGEST_BYTES, b"\0"))


@settings(max_examples=100, deadline=None)
@given(st.lists(DIGESTS, max_size=300))
def test_it_says_what_a_set_says(
    tmp_path_factory: pytest.TempPathFactory, digests: list[bytes]
) -> None:
    expected: set[bytes] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_RECENT", 5)
        patch.setattr(module, "_PAGE", 4)
        patch.setattr(module, "_BLOCK", 6)
        with closing(DigestSet(tmp_path_factory.mktemp("set"))) as found:
            for digest in digests:
                assert found.add(digest) == (digest not in expected)
                expected.add(digest)


def test_memory_does_not_grow_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RECENT", 500)
    monkeypatch.setattr(module, "_BLOCK", 500)

    def peak(count: int) -> int:
        with closing(DigestSet(tmp_path)) as found:
            tracemalloc.start()
            for number in range(count):
                found.add(hashlib.blake2b(b"%d" % number, digest_size=DIGEST_BYTES).digest())
            highest = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        return highest

    few = peak(2_000)
    # A set in memory would take some 100 bytes for each of 16,000 more.
    assert peak(18_000) < few + 16_000 * 8
    assert list(tmp_path.iterdir()) == []
