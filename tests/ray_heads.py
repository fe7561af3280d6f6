"""Servers that are found where a Ray head was looked for, as Ray's clients see them. No Ray."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc

from cluster.ray_session import CHECK_ALIVE


class Head(grpc.GenericRpcHandler):
    """Answers that it is alive, where it `knows` that call, and nothing else, ever. `asked` once something else was."""

    def __init__(self, knows: bool) -> None:
        self.asked = threading.Event()
        self.released = threading.Event()
        self._knows = knows

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler | None:
        if handler_call_details.method == CHECK_ALIVE:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: b"") if self._knows else None
        return grpc.unary_unary_rpc_method_handler(self._silence)

    def _silence(self, request: bytes, context: Any) -> bytes:
        self.asked.set()
        self.released.wait()
        return b""


@contextlib.contextmanager
def listening(*, knows: bool = True) -> Iterator[tuple[str, Head]]:
    """HOST:PORT, and what answers there."""
    head = Head(knows)
    server = grpc.server(futures.ThreadPoolExecutor(8), handlers=(head,))
    port = server.add_insecure_port("0.0.0.0:0")  # Ray goes to an address of this machine for 127.0.0.1
    server.start()
    try:
        yield f"127.0.0.1:{port}", head
    finally:
        head.released.set()
        server.stop(None).wait()
