"""How many ranks a prompt is computed by: few for a short one, many for a long one (ByteScale, arXiv 2502.21231).

Pure: costs in, a width out. Which groups there are is none of its business.
"""

from __future__ import annotations

from collections.abc import Mapping

from serving.step_cost import StepCost, StepLoad


def choose_width(tokens: int, costs: Mapping[int, StepCost], within: float | None = None) -> int:
    """The width, of those that `costs` has the step cost of, for a prompt of so many tokens.

    With an objective of `within` seconds: of the widths that meet it the one that takes the fewest rank-seconds, the
    number of ranks times their time. Without one, or where none meets it: the quickest. Of equals the narrower. Raises
    ValueError without a width, or for a prompt of no tokens.
    """
    if not costs or tokens < 1:
        raise ValueError(f"no width for {tokens} tokens among {len(costs)}")
    load = StepLoad.of(0, tokens)
    seconds = {width: cost.seconds(load) for width, cost in costs.items()}
    meeting = [width for width, needed in seconds.items() if within is not None and needed <= within]
    if meeting:
        return min(meeting, key=lambda width: (width * seconds[width], width))
    return min(seconds, key=lambda width: (seconds[width], width))
