"""What a server with a file of API keys says of it, for Prometheus. No label names a key or a tenant.

/metrics asks for no key: figures by tenant would tell each what the others do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.worker_metrics import PREFIX


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyFigures:
    """Of the file: keys in it, how often it was read, and how often it could not be, so that the last keys stayed."""

    keys: int = 0
    loads: int = 0
    failures: int = 0
    refused: int = 0  # requests without a valid key


class KeyMetrics(Collector):
    """Metrics of the keys that a server accepts."""

    def __init__(self, figures: Callable[[], KeyFigures] = KeyFigures, prefix: str = PREFIX):
        self._figures = figures
        self._prefix = prefix
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        found = self._figures()
        yield GaugeMetricFamily(f"{self._prefix}:api_keys", "Keys in the file of API keys", value=found.keys)
        for name, text, value in (
            ("api_keys_file_loads", "Times that the file of API keys was read", found.loads),
            ("api_keys_file_failures", "Times that it could not be, and the last keys stayed", found.failures),
            ("api_key_refused", "Requests without a valid API key", found.refused),
        ):
            yield CounterMetricFamily(f"{self._prefix}:{name}", text, value=value)

    def text(self) -> bytes:
        return generate_latest(self._registry)
