"""Ports for servers that are told where to listen some time before they do."""

import errno
import itertools
import os
import socket

# Linux takes the ports of connections, and of whoever asks for any, from 32768 on: what was free there is another's
# before its server is up. Below are Kubernetes' node ports (from 30000 on), and Ray's own (up to 23999).
FIRST, LAST = 24_000, 29_999
_STRIDE = 97  # between where two processes begin to look, whose numbers follow each other
_turns = itertools.count(os.getpid() * _STRIDE)


def free_port(host: str = "127.0.0.1") -> int:
    """A port where nobody listens, that the system gives nobody by itself, and that this process was not given just
    before."""
    for turn in itertools.islice(_turns, LAST - FIRST + 1):
        port = FIRST + turn % (LAST - FIRST + 1)
        if port_is_free(host, port):
            return port
    raise OSError(f"no port from {FIRST} to {LAST} is free on {host}")


def port_is_free(host: str, port: int) -> bool:
    """Whether something could listen there now."""
    return why_not_free(host, port) is None


def why_not_free(host: str, port: int) -> OSError | None:
    """What would hinder it, None where nothing would. Port 0 is free wherever `host` is an address of this machine."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
        except UnicodeError:
            return OSError(errno.EINVAL, "no name of a host")
    return None
