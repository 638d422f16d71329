"""A commit binds its first token to its fence: whatever is not as it was sent is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.handoff.chunk import Commit, sealed_commit, verify_commit
from serving.errors import CorruptChunk
from serving.messages import LeaseId

texts = st.text(st.sampled_from("a1\0"), max_size=4)  # of little else, so that borders between fields meet
numbers = st.integers(0, 12)
commits = st.builds(
    sealed_commit, st.builds(LeaseId, lease=texts, epoch=numbers, instance=texts), st.integers(0, (1 << 32) - 1)
)


@given(commits)
def test_a_commit_as_it_was_sealed_is_taken(commit: Commit) -> None:
    verify_commit(commit)


@given(commits, commits)
def test_no_commit_passes_with_the_digest_of_another(one: Commit, other: Commit) -> None:
    if one != other:
        with pytest.raises(CorruptChunk) as refused:
            verify_commit(replace(one, digest=other.digest))
        assert refused.value.code == "digest"


@given(commits)
def test_a_commit_without_a_digest_is_refused(commit: Commit) -> None:
    with pytest.raises(CorruptChunk):
        verify_commit(replace(commit, digest=b""))
