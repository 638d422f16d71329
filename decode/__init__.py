"""Decode: holds leases, receives KV, and draws token after token for a running batch."""
