"""Plans of one choice, and the deltas of its tokens cut anywhere, for tests of what a client is shown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from serving.api.plan import ChoiceRequest, ResponsePlan
from serving.messages import Delta, FinishReason, Request, SamplingParams, TokenLogprob

PLAIN = Request(request_id="r", prompt=(1,), sampling=SamplingParams(max_tokens=10_000))


def plan_of(request: Request = PLAIN, **fields: Any) -> ResponsePlan:
    """One streamed choice of this request, whose log-probabilities are shown if it asks for them; but for `fields`."""
    usual = {
        "id": "r",
        "created": 0,
        "model": "m",
        "fingerprint": None,
        "sequences": (ChoiceRequest(index=0, prompt_number=0, request=request),),
        "prompt_tokens": len(request.prompt),
        "stream": True,
        "include_usage": False,
        "continuous_usage": False,
        "stops": (),
        "include_stop": False,
        "skip_special_tokens": True,
        "min_tokens": 0,
        "logprobs": request.sampling.logprobs,
        "return_token_ids": False,
        "shows_output": True,
    }
    return ResponsePlan(**{**usual, **fields})


def deltas(tokens: Sequence[int], cuts: Sequence[int], finish: FinishReason) -> list[Delta]:
    """The tokens, cut at these places."""
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < len(tokens)}), len(tokens)]
    return [
        Delta(
            index=start,
            tokens=tuple(tokens[start:end]),
            logprobs=tuple(TokenLogprob(-1.0) for _ in tokens[start:end]),
            finish=finish if end == len(tokens) else None,
        )
        for start, end in pairwise(edges)
    ]
