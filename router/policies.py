"""The policies by name, as --routing-policy takes them. A new one joins here, and with it the suite of its tests."""

from __future__ import annotations

from router.goodput import Goodput
from router.policy import LeastLoaded, Policy, PrefixAware, RoundRobin, SessionSticky

POLICIES: dict[str, type[Policy]] = {
    "goodput": Goodput,
    "least_loaded": LeastLoaded,
    "prefix_aware": PrefixAware,
    "round_robin": RoundRobin,
    "session_sticky": SessionSticky,
}


def make_policy(name: str) -> Policy:
    return POLICIES[name]()
