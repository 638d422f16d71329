"""The simulator: the classes that serve, on a clock of its own, with models of computing and of the wire."""
