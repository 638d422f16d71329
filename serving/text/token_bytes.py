"""The bytes each token stands for, derived from a backend's decoder.

Text is the concatenation of these bytes, read as UTF-8: that holds for byte-level vocabularies and for SentencePiece
ones with byte fallback alike, and it is what makes decoding incremental. Decoders where a token's text depends on
its neighbours (WordPiece, CTC) are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

Spell = Callable[[str], bytes]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: the printable character that writes each byte in a byte-level vocabulary, and the byte."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    alphabet.update({chr(256 + shift): byte for shift, byte in enumerate(others)})
    return alphabet


class TokenBytes(dict[int, bytes]):
    """Token id → bytes, filled on first use; an id outside the vocabulary stands for no bytes.

    `leading_spaces` is how many spaces a decoder takes off the start of a whole text: SentencePiece writes one
    before the first word that the text does not have.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._token = backend.id_to_token
        self._spell, self.leading_spaces = _speller(backend)

    def __missing__(self, token_id: int) -> bytes:
        token = self._token(token_id)
        spelled = b"" if token is None else self._spell(token)
        self[token_id] = spelled
        return spelled


def _speller(backend: tokenizers.Tokenizer) -> tuple[Spell, int]:
    if backend.decoder is None:
        raise ValueError("the tokenizer has no decoder")
    settings = json.loads(backend.decoder.__getstate__())
    steps = settings["decoders"] if settings["type"] == "Sequence" else [settings]
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return _byte_level_speller(), 0
    if [step["type"] for step in steps] == ["Metaspace"]:
        mark: str = steps[0]["replacement"]
        return (lambda token: token.replace(mark, " ").encode()), int(steps[0]["prepend_scheme"] != "never")
    return _sentencepiece_speller(steps)


def _byte_level_speller() -> Spell:
    alphabet = byte_alphabet()

    def spell(token: str) -> bytes:
        # A token with any character outside the alphabet is an added one, written as it reads.
        codes = [alphabet.get(character, -1) for character in token]
        return token.encode() if -1 in codes else bytes(codes)

    return spell


def _sentencepiece_speller(steps: list[dict[str, Any]]) -> tuple[Spell, int]:
    """Replacements in each token, byte fallback, then tokens fused and spaces stripped from the front of the text."""
    replacements: list[tuple[str, str]] = []
    byte_fallback, leading_spaces, fused = False, 0, False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if not fused:
                replacements.append((pattern, content))
            case {"type": "ByteFallback"} if not fused:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": start, "stop": 0} if fused:
                leading_spaces = start
            case _:
                raise ValueError(f"the tokenizer's decoder has an unsupported step: {json.dumps(step)}")

    def spell(token: str) -> bytes:
        if byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for pattern, content in replacements:
            token = token.replace(pattern, content)
        return token.encode()

    return spell, leading_spaces
