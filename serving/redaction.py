"""Takes secrets out of texts that are about to be logged: those a process knows, and what looks like one.

A second line of defence: code that logs leaves headers, queries and bodies out in the first place. Pure.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import quote, quote_plus

REDACTED = "[redacted]"
LEAST_CHARACTERS = 6  # shorter known secrets would blank ordinary words
LEAST_BASE64 = 12  # the same, of what stands for a known secret in base64
_SMALL = {ord(letter): letter.lower() for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}

# Of the patterns: each has one group that takes part, which is the secret, and reads a bounded part in vain.
_WORD = r"[^\s\"'&,;]"
_QUOTE = r"\\{0,3}[\"']"
_SIGN = rf"(?:\s?(?:=|%3d)\s?|(?:{_QUOTE}){{1,2}}\s?[:=,]\s?)"  # after a name, or a quoted one
_NOT = r"(?!b?[\"']?(?:(?:none|null|true|false)\b|\[redacted))"
# Up to the bracket or the quote that closes it, or else one word.
_VALUE = rf"[(\[]([^)\]]{{1,512}})|b?\\{{0,3}}\"([^\"\n]{{1,512}})|b?\\{{0,3}}'([^'\n]{{1,512}})|({_WORD}+)"
_MIXED = rf"(?=[\"']?{_WORD}{{0,64}}[0-9])[\"']?({_WORD}{{6,}})"  # for where any English word may follow
_NAMED = rf"(?:{_SIGN}{_NOT}(?:{_VALUE})|:\s{{1,8}}{_MIXED})"
_SCHEME = r"(?:bearer|basic|token|digest|negotiate)(?:\s|%20|\+|\\t){1,8}"
_ENGLISH = r"(?!(?:auth\w*|tokens?|schemes?|headers?|credentials?|assum\w+)\b)"
_KEYS = ("api", "api_", "api-", "api%5f", "access_", "access-", "secret_", "private_", "cluster_", "cluster-", "?", "&")
_TOKENS = ("access_", "access-", "refresh_", "auth_", "api_", "hub_", "hf_", "id_", "session_", "github_")


def _behind(*words: str) -> str:
    return "(?:" + "|".join(f"(?<={re.escape(word)})" for word in words) + ")"


@dataclass(frozen=True, slots=True)
class SecretForm:
    """What a secret looks like from its `mark` on, which is in small letters.

    Its pattern is tried where the mark is: looking for the pattern everywhere takes a tenth of a millisecond.
    """

    mark: str
    pattern: re.Pattern[str]


def _form(mark: str, rest: str, before: str = "") -> SecretForm:
    return SecretForm(mark, re.compile(f"{before}{mark}{rest}", re.IGNORECASE))


_FORMS = (
    SecretForm("key", re.compile(rf"{_behind(*_KEYS)}keys?{_NAMED}", re.IGNORECASE)),
    _form("key", rf"{_behind('--api-key', '--cluster-key')}\s{_MIXED}"),
    _form("x-api-key", rf"\s?:\s{{0,8}}({_WORD}+)"),
    _form("authorization", rf"{_SIGN}{_NOT}(?:b?{_QUOTE})?({_SCHEME}{_WORD}+)"),
    _form("authorization", rf"{_SIGN}{_NOT}(?:{_VALUE})"),
    _form("authorization", rf"\s?:\s{{0,8}}((?:{_SCHEME})?{_WORD}+)"),
    _form("cookie", rf"(?:{_SIGN}|\s?:\s{{0,8}}){_NOT}(?:b?{_QUOTE})?((?=[^\n\"']{{0,256}}=)[^\n\"']{{3,4096}})"),
    *(_form(name, _NAMED) for name in ("pepper", "password", "passwd", "passphrase", "secret")),
    _form(
        "token",
        rf"(?:{_SIGN}b?(?:{_QUOTE})?|:\s{{1,8}})((?=[^\s\"',;&<>]{{0,64}}[0-9])[^\s\"',;&<>]{{8,}})",
        rf"(?:(?<![a-z_-])|{_behind(*_TOKENS)})",
    ),
    *(
        _form(name, rf"(?:\s|%20|\+|\\t){{1,8}}{_ENGLISH}([^\s\"',;&]{{6,}})", "(?<![a-z])")
        for name in ("bearer", "basic")
    ),
    _form("mr-", r"[a-z0-9]{4,32}-(\w{8,})(?![\w-])"),  # and not the pods of a release that is called so
    _form("sk-", r"((?=[\w-]{0,64}[0-9])[\w-]{8,})", r"(?<![a-z0-9])"),
    _form("hf_", r"([a-z0-9]{12,})", r"(?<![a-z0-9])"),
    _form("://", r"([^/\s@\"']{1,512})@"),
    _form("private key-----", r"([\s\S]*?)(?:-----end|\Z)"),
)


class Redactor:
    """Of one process, which `knows` some secrets."""

    def __init__(self, knows: Iterable[str] = ()):
        words = {form for word in knows if len(word) >= LEAST_CHARACTERS for form in _forms_of(word)}
        self._known = sorted(words, key=len, reverse=True)

    def redacted(self, text: str) -> str:
        """The text without them; the id of one of our own keys stays."""
        for word in self._known:
            if word in text:
                text = text.replace(word, REDACTED)
        if spans := sorted(_spans(text)):
            parts, end = [], 0
            for start, stop in spans:
                if stop > end:
                    parts += [text[end:start], REDACTED if start >= end else ""]
                    end = stop
            text = "".join((*parts, text[end:]))
        return text


def _forms_of(word: str) -> Iterator[str]:
    """A known secret as it is, as it is in addresses, as Python and JSON write it, and within a text in base64."""
    data = word.encode("utf-8", "surrogateescape")
    yield from _in_base64(data)
    for form in (word, quote(data), quote(data, safe=""), quote_plus(data)):
        yield form
        yield re.sub("%..", lambda found: found[0].lower(), form) if form != word else form
    for written in (word, data):
        inner = ascii(written).removeprefix("b")[1:-1]
        yield from (inner, inner.replace("\\'", "'"), inner.replace("'", "\\'"))
    yield from (repr(word)[1:-1], json.dumps(word)[1:-1], json.dumps(word, ensure_ascii=False)[1:-1])


def _in_base64(data: bytes) -> Iterator[str]:
    """What stands for it alone, wherever in threes of bytes it begins, in both alphabets."""
    for before in range(3):
        encoded = base64.b64encode(bytes(before) + data).decode()
        alone = encoded[-(-before * 8 // 6) : (before + len(data)) * 8 // 6]
        if len(alone) >= LEAST_BASE64:
            yield from (alone, alone.replace("+", "-").replace("/", "_"))


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Where something looks like a secret, from first to last character; these places may overlap."""
    small = text.lower()
    if len(small) != len(text):  # so a few letters have it
        small = text.translate(_SMALL)
    for form in _FORMS:
        at = small.find(form.mark)
        while at >= 0:
            found = form.pattern.match(text, at)
            end = at + len(form.mark)
            if found is not None:
                assert found.lastindex is not None
                yield found.span(found.lastindex)
                end = found.end()
            at = small.find(form.mark, end)
