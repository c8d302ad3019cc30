"""Ports of our own, so that tests of several checkouts may run side by side."""

from __future__ import annotations

import socket


def free_ports(count: int) -> list[int]:
    """Return ports that nobody on this host listens at; all are held until the last is found, so they differ."""
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in taken]
    for server in taken:
        server.close()
    return ports
