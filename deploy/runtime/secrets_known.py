"""The secrets that a process has been given, so that its log can leave them out wherever they turn up."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from deploy.runtime.settings import GROUPS, Settings

# Variables, beside our settings, whose values are secrets or lists of them with commas between.
VARIABLES = (
    *("VLLM_API_KEY", "MILLRACE_API_KEY", "MILLRACE_CLUSTER_KEY", "MILLRACE_KEY_PEPPER"),
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
    *("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"),
)


def secrets_of(settings: Settings, environ: Mapping[str, str]) -> set[str]:
    """Of its settings and its environment; of several in one, each."""
    given = [*_settings(settings), *(environ.get(name, "") for name in VARIABLES)]
    return {part.strip() for text in given for word in text.split(",") for part in (word, word.partition("=")[2])} - {
        ""
    }


def _settings(settings: Settings) -> Iterator[str]:
    for name in GROUPS:
        group = getattr(settings, name)
        for field in dataclasses.fields(group):
            if field.metadata["secret"]:
                yield getattr(group, field.name) or ""
