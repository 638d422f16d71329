"""Deployments on Ray: their layout, and the ties of their processes. No cluster."""
