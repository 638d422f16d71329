"""What `millrace autoscale --on` leads to: which place, by which address and key, and what is refused by name."""

from __future__ import annotations

import argparse

import pytest

from deploy.admin import Server
from deploy.autoscale import PLACES, add_arguments
from deploy.autoscale_places import CLUSTER_KEY, holder
from deploy.autoscaler.by_router import CLAIM_SECONDS, RouterActuator
from serving.messages import Role

SERVER = Server("http://127.0.0.1:8000", None)


def given(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_a_router_is_both_what_acts_and_who_says_whose_turn_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CLUSTER_KEY, "of the environment")
    actuator, lock = PLACES["router"](given("--on", "router", "--control", "10.0.0.1:8100"), SERVER)
    assert isinstance(actuator, RouterActuator) and actuator is lock
    assert (actuator.address, actuator._cluster_key, actuator.holder) == (
        "10.0.0.1:8100",
        "of the environment",
        holder(),
    )
    named, _ = PLACES["router"](given("--cluster-key", "given", "--interval", "200"), SERVER)
    assert isinstance(named, RouterActuator) and named._cluster_key == "given"
    assert (actuator.claim, named.claim) == (CLAIM_SECONDS, 500.0), "it is still held at the next turn"


def test_certificates_that_cannot_be_used_are_told_of_at_once() -> None:
    with pytest.raises(ValueError, match="grpc-tls-certfile"):
        PLACES["router"](given("--grpc-tls-certfile", "/nowhere"), SERVER)


def test_kubernetes_needs_deployments_and_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ValueError, match="--deployment prefill=NAME"):
        PLACES["kubernetes"](given("--on", "kubernetes"), SERVER)
    arguments = given("--on", "kubernetes", "--deployment", "prefill=p", "--deployment", "decode=d")
    assert dict(arguments.deployment) == {Role.PREFILL: "p", Role.DECODE: "d"}
    with pytest.raises(ValueError, match="this is no pod"):
        PLACES["kubernetes"](arguments, SERVER)
    for wrong in ("prefill", "draft=d", "decode="):
        with pytest.raises(SystemExit):
            given("--deployment", wrong)


def test_a_controller_in_a_pod_goes_by_its_name() -> None:
    assert holder({"POD_NAME": "millrace-autoscaler-1"}) == "millrace-autoscaler-1"
    assert holder({}) == holder({})
