"""One worker: how it is built, what it is, and the process it runs in."""
