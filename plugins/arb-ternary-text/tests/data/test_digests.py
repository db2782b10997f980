"""A set of digests on disk is a set."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arb_ternary_text.data.digests import DIGEST_BYTES, DigestSet

#: Few different digests, so that many occur twice; zero bytes at the end count.
DIGESTS = st.binary(max_size=2).map(lambda start: start.ljust(DIGEST_BYTES, b"\0"))


@settings(max_examples=50, deadline=None)
@given(st.lists(DIGESTS, max_size=300))
def test_it_says_what_a_set_says(
    tmp_path_factory: pytest.TempPathFactory, digests: list[bytes]
) -> None:
    expected: set[bytes] = set()
    folder = tmp_path_factory.mktemp("set")
    with closing(DigestSet(folder)) as found:
        for digest in digests:
            assert found.add(digest) == (digest not in expected)
            expected.add(digest)
    assert list(folder.iterdir()) == []


def test_a_file_that_was_left_is_replaced(tmp_path: Path) -> None:
    digest = b"a" * DIGEST_BYTES
    left = DigestSet(tmp_path)
    assert left.add(digest)
    with closing(DigestSet(tmp_path)) as found:
        assert found.add(digest)
    left.close()
