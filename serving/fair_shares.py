"""How much each tenant has been served, and what one that comes back is owed. Pure."""

from __future__ import annotations

from collections.abc import Collection

from serving.messages import Request

MOST_TENANTS = 4096


def tenant_of(request: Request) -> str:
    """Who shares fairly with others: an API key, or where none is required, a cache salt."""
    return request.client or request.tenant


class FairShares:
    """Tokens that tenants were served, by which the next is chosen: the one that has had the least.

    Of MOST_TENANTS, and of all that wait.
    Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): a tenant that comes back is lifted to the
    least of those that wait, so that nobody saves up service while idle. Where nobody waits it is lifted to what
    the one served last had: a newcomer is owed nothing of what others were served before it came.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._last = 0.0  # what the tenant served last had before

    def arrived(self, tenant: str, waiting: Collection[str]) -> None:
        """The tenant has a request again; `waiting` are those that have some."""
        if tenant not in waiting:
            least = min((self._served.get(other, 0.0) for other in waiting), default=self._last)
            self._served[tenant] = max(self._served.pop(tenant, 0.0), least)
            if len(self._served) > MOST_TENANTS:
                self._forget({*waiting, tenant})

    def charge(self, tenant: str, tokens: float) -> None:
        served = self._served.pop(tenant, self._last)
        self._last = max(self._last, served)
        self._served[tenant] = served + tokens

    def _forget(self, needed: Collection[str]) -> None:
        """One that was served longest ago and does not wait: what those have had who wait is known."""
        oldest = next((tenant for tenant in self._served if tenant not in needed), None)
        if oldest is not None:
            del self._served[oldest]

    def served(self, tenant: str) -> float:
        return self._served.get(tenant, 0.0)
