"""Finds where a JSON value ends in text that comes in parts: counts brackets and strings, checks nothing else."""

from __future__ import annotations

import re

_BRACKETS = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_AFTER_SCALAR = re.compile(r"[\s,\]}]")


class ValueScanner:
    """One value. Linear in its text, however that is cut."""

    __slots__ = ("_begun", "_depth", "_escaped", "_in_string", "_scalar")

    def __init__(self) -> None:
        self._begun = False
        self._scalar = False
        self._in_string = False
        self._escaped = False
        self._depth = 0

    def scan(self, text: str, at: int) -> tuple[int, bool]:
        """How far the value reaches in `text` from `at` on, and whether it ends there."""
        if not self._begun:
            self._begun, self._scalar = True, text[at] not in '"{['
        if self._scalar:
            found = _AFTER_SCALAR.search(text, at)
            return (len(text), False) if found is None else (found.start(), True)
        while at < len(text):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            found = (_IN_STRING if self._in_string else _BRACKETS).search(text, at)
            if found is None:
                return len(text), False
            at = found.end()
            self._count(found.group())
            if self._depth == 0 and not self._in_string:
                return at, True
        return at, False

    def _count(self, mark: str) -> None:
        if mark == "\\":
            self._escaped = True
        elif mark == '"':
            self._in_string = not self._in_string
        else:
            self._depth += 1 if mark in "{[" else -1
