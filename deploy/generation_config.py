"""The sampling defaults a model brings along, in the generation_config.json of its folder.

vLLM takes the same fields from it. A GGUF file has none.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from serving.api.body import parse_body
from serving.api.schema import UNBOUNDED, SamplingBody
from serving.api.settings import SamplingDefaults
from serving.checkpoint.json_file import read_json
from serving.errors import InvalidRequest

log = logging.getLogger(__name__)

_FIELDS = {  # as the file names them, and as we do
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def sampling_defaults(path: Path) -> SamplingDefaults:
    """What the model at `path` wants where a request says nothing; a value no request may have is left out.

    Raises ValueError for a file that is no JSON.
    """
    file = path / "generation_config.json"
    given = read_json(file) if file.is_file() else {}
    found = {ours: _value(theirs, given.get(theirs)) for theirs, ours in _FIELDS.items()}
    return SamplingDefaults(**{name: value for name, value in found.items() if value is not None})


def _value(name: str, given: object) -> Any:
    """The value as a request would have it; None where it says nothing, or no request may."""
    try:
        fields, _ = parse_body(SamplingBody, json.dumps({name: given}).encode())
    except InvalidRequest:
        log.warning("generation_config.json: %s = %.80r is out of range, and ignored", name, given)
        return None
    value = getattr(fields, name)
    return None if value == UNBOUNDED else value


def told(defaults: SamplingDefaults) -> str:
    """For the log: every default that is not what it would be without the model's file."""
    plain = asdict(SamplingDefaults())
    own = [f"{name} {value:g}" for name, value in asdict(defaults).items() if value != plain[name]]
    return f"{', '.join(own)} (the model's generation_config.json)" if own else "temperature 1, nothing else"
