"""A server of ours as a measurement sees it: `python -m tests.fakes.served serve --port N` is healthy, and no more."""

from __future__ import annotations

import argparse
from http.server import BaseHTTPRequestHandler, HTTPServer


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    HTTPServer(("127.0.0.1", parser.parse_known_args()[0].port), Healthy).serve_forever()


if __name__ == "__main__":
    main()
