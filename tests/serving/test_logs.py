"""The request id in log lines: set inside the context, and gone after it, whoever ends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from serving.logs import _request_id, request_context


async def answers() -> AsyncGenerator[str]:
    with request_context("r"):
        yield _request_id.get()
        yield _request_id.get()


def test_the_id_is_there_inside_alone() -> None:
    with request_context("r"):
        assert _request_id.get() == "r"
        with request_context("other"):
            assert _request_id.get() == "other"
        assert _request_id.get() == "r"
    assert _request_id.get() == "-"


async def test_a_stream_that_was_left_may_be_ended_by_another_task() -> None:
    """So gRPC does with a call whose connection broke."""
    stream = answers()
    assert await asyncio.create_task(anext(stream)) == "r"
    await asyncio.create_task(stream.aclose())
    assert _request_id.get() == "-"
