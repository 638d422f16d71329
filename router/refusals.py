"""With what words and codes a router turns a request away, and when it may come again. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from router.chances import within
from router.predict import Prediction
from router.request_state import RequestState
from serving.errors import DeadlineExceeded, Overloaded, Quarantined, Unavailable

HOPELESS = 0.1  # a chance to meet the TTFT objective below this counts as none
JITTER = 0.25  # of retry_after, either way: clients that are refused together do not come back together
MIN_RETRY, LONGEST_RETRY = 0.1, 600.0  # seconds: after so long a queue is another one
NO_PREFILL = "no prefill worker is ready; start one, or look at /health"
NO_DECODE = "no decode worker is ready; start one, or look at /health"
NO_SPLIT = (
    "--strict-disaggregation: there is no prefill worker with another worker to decode for it; start them, or look at"
    " /health"
)


def nobody_ready(why: str, *, strict: bool) -> Unavailable:
    """No worker was there to take the request. `strict`: no pair of workers apart."""
    return Unavailable(NO_SPLIT if strict else why, code="no_split_placement" if strict else None, retry_after=2.0)


def no_room(patience: float) -> Overloaded:
    """The workers that were there were full for `patience` seconds."""
    return Overloaded(f"no worker had room within {patience:g} s", code="no_room", retry_after=1.0)


def broke_workers(names: Sequence[str]) -> Quarantined:
    """These workers died while they computed the request."""
    told = f"{len(names)} workers died while they computed this request ({', '.join(names)}): it is given to no other"
    return Quarantined(told, code="quarantined")


def deadline_passed() -> DeadlineExceeded:
    """It was not patience that ended."""
    return DeadlineExceeded("the request's deadline has passed", code="deadline")


def hopeless(predicted: Prediction, left: float | None, objective: float | None) -> bool:
    """True if this placement has no chance to meet the TTFT objective, `left` seconds from now; None: there is none.

    `objective` is the whole of it, in seconds. Where nothing is before a prompt that takes longer by itself, to refuse
    it would leave a worker idle, and nothing would come that corrects a prediction from a bad minute, or is cached for
    the next one of its kind.
    """
    if left is None or within(left, predicted.ttft, predicted.error) >= HOPELESS:
        return False
    return predicted.queue > 0.0 or objective is None or within(objective, predicted.ttft, predicted.error) >= HOPELESS


def check_hope(predicted: Prediction, left: float | None, state: RequestState) -> None:
    """Raises Overloaded if the best placement has no chance to meet the TTFT objective, `left` seconds from now.

    It names a time only where waiting helps: where the prompt alone takes longer there is none. A request that comes
    again has its whole objective before it.
    """
    objective = None if state.request.slo.ttft_ms is None else state.request.slo.ttft_ms / 1e3
    if left is None or not hopeless(predicted, left, objective):
        return
    alone = predicted.ttft * predicted.prefill / max(1e-9, predicted.queue + predicted.prefill)
    spare, whole = 1.0 + JITTER * (state.salt % 1000 / 500 - 1.0), left if objective is None else objective
    rest = f"{left:.2g} s are left of ttft_slo_ms" if left > 0.0 else "ttft_slo_ms is over"
    raise Overloaded(
        f"the first token would come after about {predicted.ttft:.2g} s, {rest}",
        code="slo",
        retry_after=min(LONGEST_RETRY, max(MIN_RETRY, (predicted.ttft - whole) * spare)) if alone <= whole else None,
    )
