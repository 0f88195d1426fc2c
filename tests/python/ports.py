"""Ports for tests, of which several may run at the same time."""
from __future__ import annotations

import socket


class ReservedPort:
    """A port that is this test's alone: bound here and not listened on, so that only who asks for it by number gets it."""

    def __enter__(self) -> int:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(("127.0.0.1", 0))
        return self.socket.getsockname()[1]

    def __exit__(self, *_: object) -> None:
        self.socket.close()
