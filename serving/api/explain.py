"""GET /v1/requests/{id}/explain: which sequences an id stands for, and who may ask about them.

Whoever asks shows the API key of the request and, where it had one, its cache_salt. What is told comes from the router.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from serving.api.embedding_plan import EmbeddingPlan
from serving.api.plan import RequestIds, ResponsePlan
from serving.api.settings import PlacementLog
from serving.errors import NotFound

SALT = "x-cache-salt"
MOST_REQUESTS = 4096  # HTTP requests that are remembered; the router remembers fewer
MOST_SEQUENCES = 16  # of one request that are told

_Name = tuple[str, str, str]  # the key's, the cache salt, and an id


class RequestNames:
    """The sequences of recent HTTP requests, by the id of the response and by the x-request-id that it carried.

    Names of one key and salt are apart from those of others: nobody reads or hides another's.
    """

    def __init__(self, most: int = MOST_REQUESTS):
        self.most = 2 * most
        self._found: OrderedDict[_Name, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._found)

    def note(self, plan: ResponsePlan | EmbeddingPlan, ids: RequestIds, key: str) -> None:
        requests = [sequence.request for sequence in plan.sequences[:MOST_SEQUENCES]]
        for name in (plan.id, ids.shown):
            whose = (key, requests[0].tenant, name)
            self._found[whose] = tuple(request.request_id for request in requests)
            self._found.move_to_end(whose)
        while len(self._found) > self.most:
            self._found.popitem(last=False)

    def sequences(self, name: str, key: str, salt: str) -> tuple[str, ...]:
        return self._found.get((key, salt, name), ())


def explain(names: RequestNames, log: PlacementLog, name: str, key: str, salt: str) -> dict[str, Any]:
    """What is known of a request of this key and salt. Raises NotFound."""
    told: list[Mapping[str, Any]] = []
    for request_id in names.sequences(name, key, salt):
        found = log.explain(request_id)
        if found is not None:
            told.append(found)
    if not told:
        raise NotFound(f"nothing is known (any more) of a request {name[:200]!r}", param="id", code="unknown_request")
    return {"id": name, "sequences": told}
