"""Messages, model, engine and HTTP API: what every service builds on. Imports no other top-level package."""

__version__ = "0.1.0"
