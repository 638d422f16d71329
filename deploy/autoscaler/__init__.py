"""How many workers of each role the traffic needs, and who adds, drains and flips them: `millrace autoscale`."""
