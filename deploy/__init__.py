"""Puts the rooms together: the command line, workers, local wiring, processes."""
