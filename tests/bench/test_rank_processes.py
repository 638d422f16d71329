"""Processes of ranks answer by rank; where one of them dies nobody is waited for, and none is left."""

from __future__ import annotations

import multiprocessing

import pytest

from bench.rank_processes import run_ranks
from tests.bench.lonely_rank import answering, last_dies


def test_answers_are_in_the_order_of_ranks() -> None:
    assert run_ranks(3, answering, "x", preload=False) == [(rank, "x", True) for rank in range(3)]


def test_a_rank_that_dies_ends_those_that_wait_for_it() -> None:
    with pytest.raises(EOFError):
        run_ranks(2, last_dies, 2, preload=False)
    assert not multiprocessing.active_children()
