"""One worker of several processes on a host: a leader that serves, and ranks that compute their part of each step."""
