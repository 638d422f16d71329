"""The ground floor: messages, model, engine and the HTTP front door. Imports no other room."""

__version__ = "0.1.0"
