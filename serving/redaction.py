"""Takes secrets out of texts that are about to be logged: those a process knows, and what looks like one.

A second line of defence: code that logs leaves headers, queries and bodies out in the first place. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

REDACTED = "[redacted]"
LEAST_CHARACTERS = 6  # shorter known secrets would blank ordinary words
_NAMED = (
    r"(?:x-)?api[_-]?key|authorization|access[_-]?token|cluster[_-]?key|key[_-]?pepper|pepper|password|secret|token"
)
# Each keeps its first group. No pattern can take longer than the text is long.
_PATTERNS = (
    re.compile(r"\b(mr-[a-z0-9]{4,32}-)[^\s\"'&,;]+"),
    re.compile(r"\b(sk-|hf_)[A-Za-z0-9_-]{8,}"),
    re.compile(r"\b((?:bearer|basic)\s{1,8})[^\s\"',;&]{6,}", re.IGNORECASE),
    re.compile(rf"\b((?:{_NAMED})(?:[\"']{{1,2}}\s?[:=,]\s?b?[\"']|=))[^\s\"'&,;]+", re.IGNORECASE),
    re.compile(r"\b((?:x-api-key|authorization):\s{0,8})[^\s\"'&,;]+", re.IGNORECASE),
    re.compile(r"(://)[^/\s@\"']{1,512}@"),
)


class Redactor:
    """Of one process, which `knows` some secrets."""

    def __init__(self, knows: Iterable[str] = ()):
        words = sorted({word for word in knows if len(word) >= LEAST_CHARACTERS}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, words))) if words else None

    def redacted(self, text: str) -> str:
        """The text without them; the id of one of our own keys stays."""
        if self._known is not None:
            text = self._known.sub(REDACTED, text)
        for pattern in _PATTERNS:
            text = pattern.sub(rf"\1{REDACTED}", text)
        return text
