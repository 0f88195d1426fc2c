"""Ports for tests, of which several may run at the same time."""
from __future__ import annotations

import socket


class ReservedPort:
    """A port for this test only: it is bound here but not listened on, so that the system gives it to no one else."""

    def __enter__(self) -> int:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(("127.0.0.1", 0))
        return self.socket.getsockname()[1]

    def __exit__(self, *_: object) -> None:
        self.socket.close()
