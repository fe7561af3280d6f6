"""Ports for servers that a test starts, or starts again, at a place of its own: the first free one is everybody's."""

import socket

HIGHEST = 55_000  # a node of a Redis Cluster takes another port, 10,000 above its own


def free_port() -> int:
    while True:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = int(server.getsockname()[1])
        if port <= HIGHEST:
            return port
