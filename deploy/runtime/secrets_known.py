"""The secrets that a process has been given, so that its log can leave them out wherever they turn up."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from deploy.runtime.settings import GROUPS, Settings
from serving.given_files import read_given

# Variables, beside our settings, whose values are secrets or lists of them with commas between.
VARIABLES = (
    *("VLLM_API_KEY", "MILLRACE_API_KEY", "MILLRACE_CLUSTER_KEY", "MILLRACE_KEY_PEPPER"),
    *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
    *("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"),
)


def secrets_of(settings: Settings, environ: Mapping[str, str]) -> set[str]:
    """Of its settings, its environment, and the pepper's file; of several in one, each."""
    given = [*_settings(settings), *(environ.get(name, "") for name in VARIABLES)]
    found = {part.strip() for text in given for word in text.split(",") for part in (word, word.partition("=")[2])}
    return {*found, _pepper(settings.service.key_pepper_file)} - {""}


def _pepper(path: str | None) -> str:
    """Empty where there is none; who needs it says what is wrong with its file."""
    try:
        return read_given(path).strip().decode("utf-8", "surrogateescape") if path is not None else ""
    except OSError:
        return ""


def _settings(settings: Settings) -> Iterator[str]:
    for name in GROUPS:
        group = getattr(settings, name)
        for field in dataclasses.fields(group):
            if field.metadata["secret"]:
                yield getattr(group, field.name) or ""
