"""What `--headless` runs: a host that holds experts of a worker whose leader is elsewhere, for as long as it is asked.

It joins the leader, and joins it again whenever one of them was lost. A refusal ends it.
"""

from __future__ import annotations

import logging
import time

import torch

from deploy.runtime.cpu_binding import use_cores
from deploy.runtime.open_doors import check_rank_hosts
from deploy.runtime.settings import Settings
from deploy.worker.model_cache import check_model
from deploy.worker.rank_hosts import identity_of, security_of
from serving.checkpoint.hub import resolve
from serving.expert_parallel.exchange import ExchangeUnavailable
from serving.expert_parallel.shared_memory import functions
from serving.loader.loading import open_checkpoint
from serving.rank_group.host_door import HostNotYet, HostRefused, joined
from serving.rank_group.host_plan import HostPlace
from serving.rank_group.host_session import HostedModel, HostSession

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds before the leader is asked again
TAKEN_SECONDS = 60.0  # that the leader may take to say whether it takes this host


class RankHost:
    """`run()` until a signal ends the process, or the leader refuses it; returns the exit code."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def run(self) -> int:
        """Raises ValueError for what cannot be hosted, and for what the leader refuses."""
        settings, hosts = self.settings, self.settings.hosts
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
        where = (hosts.data_parallel_address, hosts.data_parallel_rpc_port)
        pause, told = FIRST_PAUSE, ""
        while True:
            try:
                line = joined(*where, security_of(settings), identity, place, TAKEN_SECONDS)
            except HostRefused as refused:
                raise ValueError(f"the leader at {where[0]}:{where[1]} does not take this host: {refused}") from refused
            except HostNotYet as error:
                if str(error) != told:
                    told = str(error)
                    log.info("not in the group yet, and trying on: %s", told)
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            pause, told = FIRST_PAUSE, ""
            log.info("%s of the group whose leader is at %s:%d", place, *where)
            session = HostSession(line, model)
            try:
                log.warning("out of the group: %s", session.serve())
            finally:
                session.close()
