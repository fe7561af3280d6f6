"""The pairwise gloo group that carries a link's payload, and how to end what blocks in it."""

import contextlib
import threading
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from headrace.errors import LinkClosed
from workers.kv.links.closing import abandonable
from workers.kv.links.pair import Pair
from workers.kv.links.staged import SOURCE, TARGET

PAYLOAD_TAG, ABORT_TAG = 1, 2

_Gloo: Any = dist.ProcessGroupGloo  # its stubs know none of its methods


class Work(Protocol):
    def wait(self, timeout: timedelta) -> bool: ...


class PairGroup:
    """Two ranks; formed anew for every pair, and closed with it. One thread at a time uses it."""

    def __init__(self, pair: Pair, me: int, seconds: float) -> None:
        """Blocks until the peer is there. LinkClosed after `seconds`, or at once when the pair closes."""
        self._closing = pair.closing
        self._peer = TARGET if me == SOURCE else SOURCE
        self._timeout = timedelta(seconds=seconds)

        def form() -> Any:
            options = _Gloo._Options()
            options._devices = [_Gloo.create_device(hostname=pair.host)]
            options._threads = 1
            options._timeout = self._timeout
            return _Gloo(pair.store, me, 2, options)

        try:
            self._group = abandonable(form, pair.closing)
        except RuntimeError as error:
            raise self._failed(error) from error
        pair.closing.on_close(lambda: threading.Thread(target=self._abort, name="link-abort", daemon=True).start())

    def send(self, tensor: Tensor) -> Work:
        """Starts sending; `tensor` must stay as it is until finish()."""
        try:
            work: Work = self._group.send([tensor], self._peer, PAYLOAD_TAG)
        except RuntimeError as error:
            raise self._failed(error) from error
        return work

    def receive(self, tensor: Tensor) -> Work:
        try:
            work: Work = self._group.recv([tensor], self._peer, PAYLOAD_TAG)
        except RuntimeError as error:
            raise self._failed(error) from error
        return work

    def finish(self, work: Work) -> None:
        """Blocks until the transfer is done. LinkClosed at once when the pair closes, or when it takes too long; the call
        into gloo is then left alone with its staging memory until it ends by itself."""
        try:
            abandonable(lambda: work.wait(self._timeout), self._closing)
        except RuntimeError as error:
            raise self._failed(error) from error

    def _failed(self, error: RuntimeError) -> LinkClosed:
        self._closing.close(str(error))
        return self._closing.error()

    def _abort(self) -> None:
        """Ends, mostly at once, what still blocks in the group. Its own abort() leaves a receive waiting until the timeout;
        but a receive that times out closes this side for good, with what waits in it. So one that can never succeed is
        let time out. Seen to miss under load, or to block itself: nobody waits for it."""
        with contextlib.suppress(RuntimeError):
            self._group.recv([torch.zeros(1)], self._peer, ABORT_TAG).wait(timedelta(milliseconds=1))
