"""What becomes of a step that raises: whose request breaks it ends, and the others go on as if nothing had been.

Each sequence of the step is computed again alone. KV is written where it was, draws depend on a sequence's own logits
and positions, and layers that have been told of are not told of again: so to repeat a step changes nothing. Where none
can be computed, one plain token tells whether the engine is broken.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from serving.engine.plan import Work
from serving.engine.run import LayerDone, Runner, RunResult, RunTimes
from serving.engine.sequence import SequenceState
from serving.errors import MISTAKES
from serving.messages import LeaseOrder, Request, SamplingParams
from serving.sampling.sampler import SamplingFailed

log = logging.getLogger(__name__)

FAILED = SamplingFailed("the server failed on this request")
PLAIN = Request(request_id="plain", prompt=(0,), sampling=SamplingParams(max_tokens=1, temperature=0.0))


def run_step(runner: Runner, work: Sequence[Work], layer_done: LayerDone | None) -> RunResult:
    """The result of the step; where it raises, that of its sequences one by one, and FAILED for those that raise.

    Raises what the runner does where no single request is to blame: all of them raise, and one token alone as well.
    """
    told = None if layer_done is None else _Told(layer_done)
    try:
        return runner.run(work, told)
    except MISTAKES:
        log.exception("a step of %d breaks", len(work))
        results = [_alone(runner, item, told) for item in work] if len(work) > 1 else [_FAILED]
        if all(result is _FAILED for result in results) and not _computes(runner, work[0]):
            raise
    for item, result in zip(work, results, strict=True):
        if result is _FAILED:
            log.error("request %s breaks its step, and fails alone", item.seq.request.request_id)
    return _joined(results)


def _alone(runner: Runner, item: Work, told: LayerDone | None) -> RunResult:
    try:
        return runner.run([item], told)
    except MISTAKES:
        return _FAILED


def _computes(runner: Runner, failed: Work) -> bool:
    """True if one plain token is computed, in the last block of a sequence that fails in any case."""
    seq = failed.seq
    if not seq.blocks:
        return False
    order = LeaseOrder(lease=seq.order.lease, request=PLAIN)
    plain = SequenceState(order, root=b"", stays=True, kv_dtype=seq.kv_dtype)
    plain.blocks = seq.blocks[-1:]
    try:
        runner.run([Work(plain, 1, failed.by)], None)
    except MISTAKES:
        return False
    return True


_FAILED = RunResult([[FAILED]], {}, RunTimes(0.0, 0.0, 0.0))


def _joined(results: Sequence[RunResult]) -> RunResult:
    """The results of single sequences as that of their step."""
    times = [result.times for result in results]
    return RunResult(
        [result.drawn[0] for result in results],
        {i: result.prompt_logprobs[0] for i, result in enumerate(results) if 0 in result.prompt_logprobs},
        RunTimes(sum(one.batch for one in times), sum(one.forward for one in times), sum(one.sample for one in times)),
        {i: result.embeddings[0] for i, result in enumerate(results) if 0 in result.embeddings},
    )


class _Told:
    """Tells of each layer of each sequence once, however often it is computed."""

    def __init__(self, tell: LayerDone) -> None:
        self._tell = tell
        self._layers: dict[int, int] = {}  # work → layers told of

    def __call__(self, work: Sequence[Work], layer: int) -> None:
        new = [item for item in work if self._layers.get(id(item), 0) <= layer]
        for item in new:
            self._layers[id(item)] = layer + 1
        if new:
            self._tell(new, layer)
