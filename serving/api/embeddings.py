"""Runs one embeddings request from its body to its last byte: prepare, ask for each input, write.

It owns the iterators of `generate` and closes each of them on every exit. Some inputs are asked for at a time, and the
answer is written in pieces: neither the router's queue nor the event loop has to do with a large request as a whole.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from math import isfinite, sqrt
from typing import cast

import numpy as np
import orjson
from starlette.datastructures import Headers, State
from starlette.types import Receive, Scope, Send

from serving.api.body_work import client_of
from serving.api.embedding_plan import EmbeddingPlan
from serving.api.plan import RequestHead
from serving.api.service import ObservedSequence, ServedResponse, Service, tell_ignored, until_deadline
from serving.errors import InternalError
from serving.messages import Delta, FinishReason, Request
from serving.tracing import tell_call

AT_ONCE = 64  # inputs of one HTTP request that are asked for at a time
PIECE_BYTES = 128 * 1024  # of vectors that are written at a time


def vector(plan: EmbeddingPlan, embedding: bytes) -> bytes:
    """What a worker has sent as the client wants it: shortened and normalized, little-endian float32.

    Raises InternalError for what cannot be an embedding of this model.
    """
    if not embedding or len(embedding) % 4 or (plan.size and len(embedding) != 4 * plan.size):
        raise InternalError(f"the worker sent {len(embedding)} bytes, which are no embedding")
    values = np.frombuffer(embedding, dtype="<f4")[: plan.dimensions].astype(np.float64)
    squares = float(values @ values)  # no sum of squares of float32 is beyond float64
    if not isfinite(squares):
        raise InternalError("the worker sent an embedding that is no numbers")
    if plan.normalize:
        values /= max(sqrt(squares), 1e-12)
    return values.astype("<f4").tobytes()


class EmbeddingResponse(ServedResponse):
    """The ASGI response of the embeddings endpoint."""

    operation = "embeddings"

    def __init__(
        self, service: Service, prepare: Callable[[bytes, RequestHead], EmbeddingPlan], headers: Headers, state: State
    ) -> None:
        super().__init__(service, headers, state)
        self._prepare = prepare

    async def _serve(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        plan = await service.bodies.run(self._prepare, body, self._head, client=client_of(scope))
        tell_ignored(plan.ignored, self._answer_headers, service.observer)
        self._spend(plan, plan.prompt_tokens)
        tell_call(plan.model, False)
        await self._answer(plan, send)

    async def _answer(self, plan: EmbeddingPlan, send: Send) -> None:
        """One JSON object once all is there: until then it may still become an error."""
        try:
            async with until_deadline(plan.deadline, self._service.clock):
                vectors = await run_inputs(self._service, plan)
        finally:
            self._tell_placement(plan)
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
        await send(start)
        for piece in pieces(plan, vectors):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)  # a socket that takes all of it at once would leave no turn to others
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def pieces(plan: EmbeddingPlan, vectors: list[bytes]) -> Iterator[bytes]:
    """The body of the answer. Each piece is made when it is asked for."""
    head = {"id": plan.id, "object": "list", "created": plan.created, "model": plan.model}
    yield orjson.dumps(head)[:-1] + b',"data":['
    shown = _base64 if plan.base64 else _numbers
    each = max(1, PIECE_BYTES // len(vectors[0]))
    for first in range(0, len(vectors), each):
        some = enumerate(vectors[first : first + each], first)
        items = [b'{"index":%d,"object":"embedding","embedding":%b}' % (i, shown(values)) for i, values in some]
        yield (b"," if first else b"") + b",".join(items)
    usage = {"prompt_tokens": plan.prompt_tokens, "total_tokens": plan.prompt_tokens}
    yield b'],"usage":' + orjson.dumps(usage) + b"}"


def _base64(values: bytes) -> bytes:
    return b'"' + b64encode(values) + b'"'


def _numbers(values: bytes) -> bytes:
    return orjson.dumps(np.frombuffer(values, dtype="<f4"), option=orjson.OPT_SERIALIZE_NUMPY)


async def run_inputs(service: Service, plan: EmbeddingPlan) -> list[bytes]:
    """The vector of every input, in order. The first failure ends the others and is raised."""
    vectors = [b""] * len(plan.sequences)
    left = iter(plan.sequences)

    async def run() -> None:
        for sequence in left:
            delta = await _embed(service, sequence.request)
            vectors[sequence.index] = vector(plan, delta.embedding)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(AT_ONCE, len(vectors))):
                group.create_task(run())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return vectors


async def _embed(service: Service, request: Request) -> Delta:
    """What the router has for one input."""
    with ObservedSequence(service, request) as end:
        # `generate` gives asynchronous generators; leaving one early is what cancels its request everywhere.
        async with aclosing(cast("AsyncGenerator[Delta]", service.generate(request))) as deltas:
            async for delta in deltas:
                if delta.embedding:
                    end.finish = FinishReason.STOP
                    return delta
        raise InternalError("a worker has answered without an embedding")
