"""The error tree: every leaf can leave through both doors, and the tree in the docstring is the tree there is."""

from __future__ import annotations

import re
from http import HTTPStatus

import grpc
import pytest

from serving import errors
from serving.errors import MillraceError, Retryable

OWN = {name: kind for name, kind in MillraceError.by_name.items() if kind.__module__ == errors.__name__}


@pytest.mark.parametrize("kind", OWN.values(), ids=OWN)
def test_every_error_has_a_status_and_a_code(kind: type[MillraceError]) -> None:
    assert 400 <= HTTPStatus(kind.status) < 600
    assert isinstance(getattr(grpc.StatusCode, kind.grpc_code), grpc.StatusCode) and kind.grpc_code != "OK"
    assert re.fullmatch(r"[a-z_]+_error|requests|tokens", kind.kind)


@pytest.mark.parametrize("kind", OWN.values(), ids=OWN)
def test_every_error_keeps_what_it_is_told(kind: type[MillraceError]) -> None:
    error = kind("what", param="messages[0]", code="why", retry_after=2.5)
    assert str(error) == error.message == "what"
    assert (error.param, error.code, error.retry_after) == ("messages[0]", "why", 2.5)
    bare = kind("what")
    assert (bare.param, bare.code, bare.retry_after) == (None, None, None)


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"[├└]── (\w+) +(\d{3})? *([A-Z_]+)?", errors.__doc__)
    assert {name for name, _, _ in drawn} | {"MillraceError"} == set(OWN)
    for name, status, code in drawn:
        assert not status or OWN[name].status == int(status), name
        assert not code or OWN[name].grpc_code == code, name


def test_clients_errors_are_four_hundreds_and_ours_five_hundreds() -> None:
    ours = {kind for kind in OWN.values() if kind.kind in ("server_error", "service_unavailable_error")}
    assert all(kind.status >= 500 for kind in ours)
    assert all(OWN[name].status < 500 for name in ("InvalidRequest", "ContextLengthExceeded", "Overloaded", "NotFound"))


def test_an_error_defined_elsewhere_is_found_by_its_name() -> None:
    class Homemade(Retryable):
        """A test's own."""

    assert MillraceError.by_name["Homemade"] is Homemade
    assert MillraceError.by_name["MillraceError"] is MillraceError
