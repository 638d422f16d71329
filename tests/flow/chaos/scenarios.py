"""The faults by name: what each does to a cluster of two prefill and two decode workers, and what has to be seen of it.

The first worker of each role is the victim, so a healthy path is left by the second ones.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.fakes.fault_proxy import HEALTHY, Faults
from tests.flow.chaos.cluster import ROUTER, ChaosCluster
from tests.flow.chaos.watch import Pair

Harm = Callable[[ChaosCluster], None]
TO_DECODE = frozenset({("prefill-0", "decode-0"), ("prefill-1", "decode-0")})
FROM_PREFILL = frozenset({("prefill-0", "decode-0"), ("prefill-0", "decode-1")})
ONE_LINK = frozenset({("prefill-0", "decode-0")})
ALL = TO_DECODE | FROM_PREFILL | {("prefill-1", "decode-1")}


@dataclass(frozen=True)
class Scenario:
    """`begin` does harm, `end` undoes it after `seconds`.

    The pairs `red` must be seen red soon after the harm; `touched` may be, and no other may. Where `hopeless`, no
    healthy path is left: requests may fail, but not outlive their `deadline`, in seconds.
    """

    name: str
    begin: Harm
    end: Harm
    seconds: float = 10.0
    red: frozenset[Pair] = field(default_factory=frozenset)
    touched: frozenset[Pair] = field(default_factory=frozenset)
    deadline: float = 60.0
    hopeless: bool = False


def faults(made: Faults, *links: Pair) -> tuple[Harm, Harm]:
    """These faults on these links; `links` are caller and called."""

    def begin(cluster: ChaosCluster) -> None:
        for link in links:
            cluster.network.link(*link).faults = made

    def end(cluster: ChaosCluster) -> None:
        for link in links:
            cluster.network.link(*link).faults = HEALTHY

    return begin, end


def everywhere(made: Faults) -> tuple[Harm, Harm]:
    """These faults on every link there is."""

    def begin(cluster: ChaosCluster) -> None:
        for link in cluster.network.links():
            link.faults = made

    return begin, lambda cluster: cluster.network.heal()


def frozen(name: str) -> tuple[Harm, Harm]:
    return lambda cluster: cluster.signal(name, signal.SIGSTOP), lambda cluster: cluster.signal(name, signal.SIGCONT)


def killed(name: str) -> tuple[Harm, Harm]:
    return lambda cluster: cluster.kill(name), lambda cluster: cluster.start(name)


UP, DOWN, BOTH = Faults(drop_up=True), Faults(drop_down=True), Faults(drop_up=True, drop_down=True)
DATA_OF_DECODE = ((ROUTER, "decode-0"), ("prefill-0", "decode-0"), ("prefill-1", "decode-0"))

KILLED_DECODE = Scenario("kill -9 of a decode worker", *killed("decode-0"), 5.0, touched=TO_DECODE)
KILLED_PREFILL = Scenario("kill -9 of a prefill worker", *killed("prefill-0"), 5.0, touched=FROM_PREFILL)
BEATS_ALONE = Scenario("a decode worker that beats but does not work", *faults(BOTH, *DATA_OF_DECODE), red=TO_DECODE)
ONE_OF_FOUR = Scenario("one prefill→decode link of four", *faults(BOTH, ("prefill-0", "decode-0")), red=ONE_LINK)
RESETS = Scenario("resets at 5 % of all messages", *everywhere(Faults(reset=0.05)), touched=ALL)

SCENARIOS = (
    KILLED_DECODE,
    KILLED_PREFILL,
    Scenario("SIGSTOP 10 s of a decode worker", *frozen("decode-0"), red=TO_DECODE),
    Scenario("SIGSTOP 10 s of a prefill worker", *frozen("prefill-0"), red=FROM_PREFILL),
    Scenario("SIGSTOP 10 s of the router", *frozen(ROUTER)),
    Scenario("router→decode dropped", *faults(UP, (ROUTER, "decode-0")), red=TO_DECODE),
    Scenario("decode→router replies dropped", *faults(DOWN, (ROUTER, "decode-0")), red=TO_DECODE),
    Scenario("router→prefill dropped", *faults(UP, (ROUTER, "prefill-0")), red=FROM_PREFILL),
    Scenario("prefill→router replies dropped", *faults(DOWN, (ROUTER, "prefill-0")), red=FROM_PREFILL),
    Scenario("prefill→decode dropped", *faults(UP, ("prefill-0", "decode-0")), red=ONE_LINK),
    Scenario("decode→prefill replies dropped", *faults(DOWN, ("prefill-0", "decode-0")), red=ONE_LINK),
    Scenario("heartbeats dropped", *faults(UP, ("decode-0", ROUTER)), touched=TO_DECODE),
    Scenario("heartbeat replies dropped", *faults(DOWN, ("decode-0", ROUTER)), touched=TO_DECODE),
    Scenario("200 ms more each way, everywhere", *everywhere(Faults(delay=0.2))),
    RESETS,
    BEATS_ALONE,
    ONE_OF_FOUR,
    Scenario(
        "every decode worker out of the router's reach, deadlines of 8 s",
        *faults(BOTH, (ROUTER, "decode-0"), (ROUTER, "decode-1")),
        15.0,
        red=ALL,
        deadline=8.0,
        hopeless=True,
    ),
)
