"""Who may reach a service: what --insecure permits. It knows no socket and no file."""

from __future__ import annotations

from dataclasses import dataclass

from serving.options import option


@dataclass(frozen=True, kw_only=True)
class SecurityConfig:
    """Who may reach the services."""

    insecure: bool = option(
        False, "listen beyond loopback without a key and without TLS, where anyone may ask and register"
    )
