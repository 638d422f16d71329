"""Chaos on real processes: a cluster with a fault proxy between every two, a steady load, and faults by name."""
