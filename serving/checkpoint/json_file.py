"""Reads the JSON files of a model's folder. It knows nothing of what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ValueError naming the file when it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as wrong:
        raise ValueError(f"{path} is not valid JSON: {wrong}") from wrong
    if not isinstance(value, dict):
        raise ValueError(f"{path} should hold a JSON object")
    return value
