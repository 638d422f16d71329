"""Secrets in texts that are to be logged: what is taken out, and what stays."""

from __future__ import annotations

import base64
import json
import time
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.redaction import LEAST_CHARACTERS, REDACTED, Redactor

SECRET = "s3cretWords"


@pytest.mark.parametrize(
    "text",
    [
        f"Authorization: Bearer {SECRET}",
        f"authorization: {SECRET}",
        f"{{'authorization': 'Bearer {SECRET}', 'x-api-key': '{SECRET}'}}",
        f"[(b'x-api-key', b'{SECRET}'), (b'authorization', b'Basic {SECRET}')]",
        f'{{"api_key": "{SECRET}"}}',
        f"GET /v1/models?api_key={SECRET}&token={SECRET}",
        f"https://user:{SECRET}@host/path and http://{SECRET}@host",
        f"mr-abcd12-{SECRET}",
        f"sk-{SECRET}-{SECRET}",
        f"HF_TOKEN=hf_{SECRET}",
        f"cluster_key={SECRET}",
        f"OPENAI_API_KEY={SECRET} MILLRACE_KEY_PEPPER={SECRET} GITHUB_TOKEN={SECRET} client_secret = {SECRET}",
        f"HttpConfig(api_key='{SECRET}', api_keys=('{SECRET}', '{SECRET}2'), cluster_key=b'{SECRET}')",
        f'api_key="with a space {SECRET}"',
        f'a body {{\\"api_key\\": \\"{SECRET}\\"}}',
        f"['--api-key', '{SECRET}'] --cluster-key {SECRET}",
        f"api_key: {SECRET} password: {SECRET} token: {SECRET}",
        f"GET /?key={SECRET}&a=1 GET /?a=1&key={SECRET} GET /?api%5Fkey={SECRET} GET /?token%3D{SECRET}",
        f"Bearer%20{SECRET} Bearer+{SECRET} Bearer\\t{SECRET}",
        f"authorization: Token {SECRET} 'authorization': 'Digest {SECRET}' X-Api-Key : {SECRET}",
        f"-----BEGIN RSA PRIVATE KEY-----\nMII{SECRET}\n{SECRET}\n-----END RSA PRIVATE KEY-----",
        f"İİİ api_key='{SECRET}'",
        f"Cookie: session={SECRET}; theme=dark",
        f"[(b'cookie', b'theme=dark; session={SECRET}')] {{'set-cookie': 'id={SECRET}; HttpOnly'}}",
    ],
)
def test_what_looks_like_a_secret_is_taken_out(text: str) -> None:
    told = Redactor().redacted(text)
    assert SECRET not in told and REDACTED in told


@pytest.mark.parametrize(
    "text",
    [
        "key mr-abcd12 is revoked, 3 tokens: 5; token ids 1, 2",
        "--api-keys-file /etc/keys: larger than 5 bytes; --api-key is empty",
        "https://host:4317/v1/traces does not answer; see http://a/@b",
        "the basis is a bearer of news",
        "a cookie: none was sent; cookies are not read",
        "pad_token=0 max_tokens=5 token=5 eos_token='</s>' 'token', 'type'",
        "api_key=None, cluster_key=[redacted], {'password': None}",
        "Bearer authentication; basic authentication failed",
        "request cmpl-0123456789abcdef0123456789abcdef of sk-learnmodel in /models/hf_cache_folder",
        "mr-worker-0-1 left; mr-mixed-5f7d9c8b9-x2x4z and mr-decode-abcde-xyz12, of a release that is called mr",
        "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef, block 0a1b2c3d4e",
    ],
)
def test_what_is_none_stays(text: str) -> None:
    assert Redactor().redacted(text) == text


@settings(max_examples=40)
@given(st.text(st.characters(exclude_characters="\0"), min_size=LEAST_CHARACTERS), st.text(), st.text())
def test_a_known_secret_never_stays(secret: str, before: str, after: str) -> None:
    told = Redactor([secret]).redacted(before + secret + after)
    assert secret in REDACTED or secret not in told.replace(REDACTED, "\0")


@pytest.mark.parametrize("secret", ["p+q/r=s==&%x", "back\\slash'quote\"", "ümläut-secret", "two words", "n\newline"])
def test_a_known_secret_is_known_as_others_write_it(secret: str) -> None:
    redactor = Redactor([secret])
    forms = [secret, quote(secret), quote(secret, safe=""), quote(secret, safe="").lower(), quote_plus(secret)]
    forms += [repr(secret)[1:-1], ascii(secret)[1:-1], repr(secret.encode())[2:-1], repr((secret, "'"))]
    forms += [json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]]
    for form in forms:
        assert REDACTED in redactor.redacted(f"x {form} y"), form


@given(
    secret=st.text(st.characters(exclude_categories=["Cs"]), min_size=12, max_size=40),
    before=st.binary(max_size=12),
    after=st.binary(max_size=12),
    urlsafe=st.booleans(),
)
def test_a_known_secret_is_known_in_base64(secret: str, before: bytes, after: bytes, urlsafe: bool) -> None:
    """As in basic authentication: what stays of it are the characters that its neighbours share, a byte at each end."""
    data = secret.encode()
    encoded = (base64.urlsafe_b64encode if urlsafe else base64.b64encode)(before + data + after).decode()
    alone = encoded[-(-len(before) * 8 // 6) : (len(before) + len(data)) * 8 // 6]
    assert alone not in Redactor([secret]).redacted(f"got {encoded} from it")


def test_of_two_secrets_the_longer_goes_first() -> None:
    assert Redactor(["secret", "secret-and-more"]).redacted("secret-and-more") == REDACTED


@pytest.mark.parametrize(
    "word",
    [
        *("://", "bearer ", "api_key=", "mr-aaaa-", "mr-aaaa", "://a", "sk-", "'api_key': '", "basic  ", "password: "),
        *("token", "token=", "api_key=(", 'api_key="', "--api-key ", "authorization:", "private key-----", "hf_a"),
    ],
)
def test_a_long_text_takes_time_by_its_length(word: str) -> None:
    """Doubling a text that has the beginnings of secrets everywhere does not take four times as long, or much more."""

    def seconds(count: int) -> float:
        text, began = word * count, time.process_time()
        Redactor(["known-secret"]).redacted(text)
        return time.process_time() - began

    assert min(seconds(40_000) for _ in range(3)) < 10 * min(seconds(10_000) for _ in range(3)) + 0.01
