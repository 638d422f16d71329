"""When the certificates in use expire, and how often their files could not be taken, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from serving.certificate import CertificateFacts
from serving.grpc_tls import GrpcTls
from serving.reloaded import ReloadedFiles
from serving.worker_metrics import COUNTER, GAUGE, PREFIX, Families


class HasFacts(Protocol):
    """What is made of a certificate's files."""

    @property
    def facts(self) -> CertificateFacts: ...


class CertificateCollector(Collector):
    """By what each certificate is for: grpc, https. Those that are None are not there."""

    def __init__(self, files: Mapping[str, ReloadedFiles[HasFacts] | None], prefix: str = PREFIX):
        self.files = {use: watched for use, watched in files.items() if watched is not None}
        self.family = Families(prefix)

    def collect(self) -> Iterator[Metric]:
        label = ("certificate",)
        left = [((use,), files.current().facts.seconds_left()) for use, files in self.files.items()]
        text = "Seconds until the certificate in use expires"
        yield self.family(GAUGE, "certificate_expiry_seconds", text, label, left)
        text = "Changes of a certificate's files that could not be taken"
        failures = [((use,), float(files.failures)) for use, files in self.files.items()]
        yield self.family(COUNTER, "certificate_reload_failures", text, label, failures)


def certificate_text(files: Mapping[str, ReloadedFiles[HasFacts] | None], prefix: str = PREFIX) -> bytes:
    """The part of /metrics."""
    registry = CollectorRegistry()
    registry.register(CertificateCollector(files, prefix))
    return generate_latest(registry)


def with_certificates(text: Callable[[], bytes], tls: GrpcTls | None, prefix: str = PREFIX) -> Callable[[], bytes]:
    """The /metrics of a service that has gRPC alone, with its certificates."""
    files = {"grpc": tls.files if tls is not None else None}
    return lambda: text() + certificate_text(files, prefix)
