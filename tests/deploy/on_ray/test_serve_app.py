"""What the Ray Serve application is given: a placement that can be served, with keys or leave to do without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.on_ray.router_process import RouterProcess, check_http
from deploy.on_ray.serve_app import build
from serving.errors import Unavailable
from serving.options import ConfigError

PLACEMENT = '[router]\nshutdown_timeout = 7\n[[workers]]\nrole = "mixed"\n'


def test_it_refuses_to_answer_anyone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MILLRACE_API_KEY", "VLLM_API_KEY", "MILLRACE_INSECURE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="Ray Serve would answer anyone who reaches its port"):
        check_http(PLACEMENT, insecure=False)
    check_http(PLACEMENT, insecure=True)
    check_http('[common]\ninsecure = true\n[[workers]]\nrole = "mixed"\n', insecure=False)
    monkeypatch.setenv("MILLRACE_API_KEY", "secret")
    check_http(PLACEMENT, insecure=False)


def test_it_refuses_certificates_of_the_nodes_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_SSL_CERTFILE", "/a")
    with pytest.raises(ValueError, match="MILLRACE_SSL_CERTFILE: Ray Serve has the port"):
        check_http(PLACEMENT, insecure=True)


async def test_one_that_does_not_run_is_told_of() -> None:
    with pytest.raises(Unavailable, match="has ended"):
        RouterProcess(PLACEMENT, insecure=True).check()


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"placement": "a", "count": 2}, ValueError, "unknown argument 'count'"),
        ({}, ValueError, "needs placement=FILE"),
        ({"placement": "a", "placement_toml": "b"}, ValueError, "needs placement=FILE"),
        ({"placement": "/nowhere.toml"}, ValueError, "placement=/nowhere.toml: "),
        ({"placement_toml": '[[workers]]\nrole = "cook"\n'}, ConfigError, "placement_toml:2: .* 'cook'"),
        ({"placement_toml": '[router]\nssl_certfile = "/a"\n' + PLACEMENT[29:]}, ValueError, "certificates of its own"),
    ],
)
def test_what_could_not_be_served_is_refused_before_anything_starts(
    arguments: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        build(arguments)


def test_the_application_is_one_replica_that_has_time_to_drain(tmp_path: Path) -> None:
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'millrace[ray-serve]'")
    file = tmp_path / "placement.toml"
    file.write_text(PLACEMENT)
    bound = build({"placement": str(file), "insecure": "true"})._bound_deployment
    assert (bound.name, bound.num_replicas, bound.max_ongoing_requests) == ("router", 1, 100_000)
    assert bound._deployment_config.graceful_shutdown_timeout_s == 2 * 7 + 20
