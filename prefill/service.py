"""The prefill worker's gRPC door: one call a prefill, whose reply stream ends when the KV has been handed over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from grpc import aio

from prefill.worker import PrefillWorker
from serving.errors import Draining
from serving.logs import request_context
from serving.messages import PrefillOrder
from serving.proto import millrace_pb2 as pb
from serving.proto import millrace_pb2_grpc as stubs
from serving.rpc import answering
from serving.wire import from_pb, to_pb


class PrefillService(stubs.PrefillServicer):
    """Serves `Prefill` for one worker at a time; None: there is none just now."""

    def __init__(self, worker: PrefillWorker | None):
        self.worker = worker

    async def Run(self, request: pb.PrefillOrder, context: aio.ServicerContext) -> AsyncIterator[pb.Prefilled]:
        order = from_pb(request, PrefillOrder)
        with request_context(order.order.request):
            async with answering(context):
                if self.worker is None:
                    raise Draining("the worker changes its role")
                async with aclosing(self.worker.run(order)) as results:
                    async for prefilled in results:
                        yield to_pb(prefilled, pb.Prefilled)
