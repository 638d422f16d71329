"""What every process needs beside its work: heartbeats, an HTTP server, child processes, CPU binding."""
