"""Where workers run, as `millrace autoscale --on` names it, and how the autoscaler reaches it.

`router` is for child processes of `millrace serve` and for a deployment on Ray, `kubernetes` for the chart's pods.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Mapping

from deploy.admin import Server
from deploy.autoscaler.actuator import Actuator
from deploy.autoscaler.by_kubernetes import KubernetesActuator
from deploy.autoscaler.by_router import CLAIM_SECONDS, RouterActuator
from deploy.autoscaler.kube_api import KubeApi
from deploy.autoscaler.kube_lease import KubeLease
from deploy.autoscaler.lock import ControllerLock
from serving.config import ClusterConfig
from serving.grpc_tls import grpc_tls
from serving.messages import Role
from serving.options import ENV_PREFIX, add_flags, build
from serving.security_config import SecurityConfig

CLUSTER_KEY = f"{ENV_PREFIX}CLUSTER_KEY"


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """How the places are reached."""
    parser.add_argument(
        "--control",
        default=ClusterConfig().routers,
        metavar="HOST:PORT",
        help=f"the router's gRPC, for --on router and kubernetes (default: {ClusterConfig().routers})",
    )
    parser.add_argument("--cluster-key", metavar="KEY", help=f"the key it asks for; better set {CLUSTER_KEY}")
    add_flags(parser, SecurityConfig)
    parser.add_argument(
        "--deployment",
        action="append",
        default=[],
        type=role_deployment,
        metavar="ROLE=NAME",
        help="with --on kubernetes, the Deployment of each role that may be scaled; give it several times",
    )
    parser.add_argument(
        "--lease",
        default="millrace-autoscaler",
        metavar="NAME",
        help="with --on kubernetes, the Lease held by the one that acts (default: millrace-autoscaler)",
    )


def role_deployment(text: str) -> tuple[Role, str]:
    role, _, name = text.partition("=")
    if role not in tuple(Role) or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form decode=NAME")
    return Role(role), name


def holder(environ: Mapping[str, str] = os.environ) -> str:
    """Who this controller is, for others: its pod, else its host and process."""
    return environ.get("POD_NAME") or f"{socket.gethostname()}-{os.getpid()}"


def over_router(arguments: argparse.Namespace) -> RouterActuator:
    """Its claim outlasts two of the controller's turns. Raises ValueError for certificates that cannot be used."""
    tls = grpc_tls(build(SecurityConfig, {}, os.environ, vars(arguments)))
    key, claim = arguments.cluster_key or os.environ.get(CLUSTER_KEY), max(CLAIM_SECONDS, 2.5 * arguments.interval)
    return RouterActuator(arguments.control, key, holder(), tls, claim=claim)


def by_router(arguments: argparse.Namespace, _: Server) -> tuple[Actuator, ControllerLock]:
    """The router knows who controls."""
    made = over_router(arguments)
    return made, made


def by_kubernetes(arguments: argparse.Namespace, _: Server) -> tuple[Actuator, ControllerLock]:
    """A Lease knows. Raises ValueError outside of a pod, or where no Deployment is named."""
    deployments = dict(arguments.deployment)
    if not deployments:
        raise ValueError("--on kubernetes needs the Deployments: --deployment prefill=NAME --deployment decode=NAME")
    api = KubeApi.of_this_pod()
    return KubernetesActuator(api, deployments, over_router(arguments)), KubeLease(api, arguments.lease, holder())
