"""What `--headless` runs: a host that holds experts of a worker whose leader is elsewhere, for as long as it is asked.

It joins the leader, and joins it again whenever one of them was lost. A refusal ends it: that of somebody who does not
show to be the leader only when it has lasted, since they may have come in its place while it is away. Told to leave
while it is in a group it stays as long as its leader needs it, and joins no other: who replaces all pods at once ends
it while the worker still drains, and starts the next worker when that has gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import torch

from deploy.runtime.cpu_binding import use_cores
from deploy.runtime.open_doors import check_rank_hosts
from deploy.runtime.settings import Settings
from deploy.runtime.signals import LeavesWhenDone
from deploy.worker.model_cache import check_model
from deploy.worker.rank_hosts import identity_of, security_of
from serving.checkpoint.hub import resolve
from serving.expert_parallel.exchange import ExchangeUnavailable
from serving.expert_parallel.shared_memory import functions
from serving.loader.loading import open_checkpoint
from serving.rank_group.host_door import HostNotYet, HostRefused, HostUnproven, joined
from serving.rank_group.host_line import HostLine
from serving.rank_group.host_plan import HostPlace
from serving.rank_group.host_session import HostedModel, HostSession

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds before the leader is asked again
TAKEN_SECONDS = 60.0  # that the leader may take to say whether it takes this host
UNPROVEN_SECONDS = 300.0  # that somebody who does not show to be the leader may turn this host away


class RankHost:
    """`run()` until a signal ends it, and the leader has gone that it is with; returns the exit code."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def run(self) -> int:
        """Raises ValueError for what cannot be hosted, and for what the leader refuses."""
        settings, hosts = self.settings, self.settings.hosts
        signals = LeavesWhenDone("as a host of ranks that is in no group", settings.http.shutdown_timeout)
        config = settings.model_config
        check_rank_hosts(hosts, settings.cluster, settings.security)
        use_cores(settings.engine.cpus, settings.engine.threads)
        path = resolve(settings.model)
        check_model(path, config)
        try:
            functions()  # compiled here, and not by all ranks at once while the leader's wait for them
        except ExchangeUnavailable as error:
            raise ValueError(f"--headless: {error}") from error
        place, identity = HostPlace(*hosts.hosted(config.data_parallel_size)), identity_of(path, config)
        model = HostedModel(
            path=path,
            dtype=identity.dtype,
            spec=open_checkpoint(path)[0],
            place=place,
            threads=max(1, torch.get_num_threads() // place.ranks),
        )
        torch.set_num_threads(1)  # its ranks compute
        address, port = hosts.data_parallel_address, hosts.data_parallel_rpc_port
        join = partial(joined, address, port, security_of(settings), identity, place, TAKEN_SECONDS)
        while not signals.asked:
            session = HostSession(taken_in(join, f"{address}:{port}"), model)
            log.info("%s of the group whose leader is at %s:%d", place, address, port)
            try:
                with signals.needed():
                    log.warning("out of the group: %s", session.serve())
            finally:
                session.close()
        log.info("told to leave, and out of the group: leaving")
        return 0


def taken_in(join: Callable[[], HostLine], where: str) -> HostLine:
    """What `join` gives once the leader at `where` takes this host. Raises ValueError for a refusal."""
    pause, told, turned_away = FIRST_PAUSE, "", None
    while True:
        try:
            return join()
        except HostRefused as refused:
            raise ValueError(f"the leader at {where} does not take this host: {refused}") from refused
        except HostUnproven as error:
            turned_away = turned_away or time.monotonic()
            reason = (
                f"who answers at {where} does not take this host, and does not show its cluster key: see that all hosts"
                " of the group have the same one, and what listens there"
            )
            if time.monotonic() - turned_away >= UNPROVEN_SECONDS:
                raise ValueError(f"{reason} ({error})") from error
            if reason != told:
                log.warning("%s (%s); trying on for %.0f s", reason, error, UNPROVEN_SECONDS)
        except HostNotYet as error:
            turned_away, reason = None, str(error)
            if reason != told:
                log.info("not in the group yet, and trying on: %s", reason)
        told = reason
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
