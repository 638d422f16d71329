"""KV goes over what opens no port to other hosts, unless that is permitted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.runtime.kv_transports import INTERFACES, keep_nixl_on_loopback, kv_transport_of
from kvcache.transfer.choice import AUTO, WITHIN_HOST, chosen
from kvcache.transfer.nixl_agent import installed
from serving.config import ClusterConfig
from serving.security_config import SecurityConfig

HERE, EVERYWHERE = ClusterConfig(), ClusterConfig(grpc_host="0.0.0.0", cluster_key="key")
CLOSED, OPEN = SecurityConfig(), SecurityConfig(insecure=True)
REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("cluster", [HERE, EVERYWHERE])
def test_auto_means_what_opens_no_port(cluster: ClusterConfig) -> None:
    assert kv_transport_of(AUTO, cluster, CLOSED) == WITHIN_HOST and "nixl" not in chosen(WITHIN_HOST)
    assert kv_transport_of(AUTO, cluster, OPEN) == AUTO
    assert [kv_transport_of(kind, cluster, CLOSED) for kind in ("shm", "grpc")] == ["shm", "grpc"]


def test_nixl_is_refused_where_others_would_reach_it() -> None:
    with pytest.raises(ValueError, match=r"--kv-transport nixl.*0\.0\.0\.0.*--insecure"):
        kv_transport_of("nixl", EVERYWHERE, CLOSED)
    assert kv_transport_of("nixl", EVERYWHERE, OPEN) == kv_transport_of("nixl", HERE, CLOSED) == "nixl"


def test_interfaces_that_the_user_names_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACES, "mlx5_0:1")
    keep_nixl_on_loopback("nixl", CLOSED)
    assert os.environ[INTERFACES] == "mlx5_0:1"
    monkeypatch.delenv(INTERFACES)
    keep_nixl_on_loopback("nixl", OPEN)
    keep_nixl_on_loopback("grpc", CLOSED)
    assert INTERFACES not in os.environ


@pytest.mark.skipif(not installed(), reason="needs the package nixl")
def test_nixl_stays_on_loopback() -> None:
    """In a process of its own: UCX reads its environment once."""
    code = (
        "import os; from deploy.runtime.kv_transports import keep_nixl_on_loopback as keep;"
        "from serving.security_config import SecurityConfig; from kvcache.transfer.nixl_agent import Agent;"
        "from tests.flow.listening import listening; keep('nixl', SecurityConfig()); agent = Agent(1 << 20);"
        "print(sorted({address for address, _ in listening(os.getpid())})); agent.close()"
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.splitlines()[-1:] == ["['127.0.0.1']"], done.stdout + done.stderr
