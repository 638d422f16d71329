"""What every process needs beside its work: settings, heartbeats, an HTTP server, child processes, CPU binding."""
