"""One worker of several processes: a leader that serves, and ranks, here and elsewhere, which compute of each step."""
