"""Reads a role from a word that another service has sent."""

from __future__ import annotations

from serving.errors import InvalidRequest
from serving.messages import Role


def role_of(word: str) -> Role:
    """Raises InvalidRequest."""
    try:
        return Role(word)
    except ValueError:
        roles = ", ".join(role.value for role in Role)
        raise InvalidRequest(f"there is no role {word!r}; there are {roles}", param="role") from None
