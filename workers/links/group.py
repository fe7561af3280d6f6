"""The pairwise gloo group that carries a link's payload, and how to end what blocks in it."""

import contextlib
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from headrace.errors import LinkClosed
from workers.links.closing import abandonable
from workers.links.pair import Pair

SOURCE, TARGET = 0, 1
PAYLOAD_TAG, ABORT_TAG = 1, 2

_Gloo: Any = dist.ProcessGroupGloo  # its stubs know none of its methods


class Work(Protocol):
    def wait(self, timeout: timedelta) -> bool: ...


class PairGroup:
    """Two ranks; formed anew for every pair, and closed with it. One thread uses it."""

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
        pair.closing.on_close(self._abort)

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
        """Blocks until the transfer is done. LinkClosed when the pair closes, or it takes too long."""
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise self._failed(error) from error

    def _failed(self, error: RuntimeError) -> LinkClosed:
        self._closing.close(str(error))
        return self._closing.error()

    def _abort(self) -> None:
        """Ends whatever blocks in the group, at once. Its own abort() leaves a receive waiting until the timeout; but a
        receive that times out closes this side for good, with all that waits in it. So one that can never succeed is
        let time out."""
        with contextlib.suppress(RuntimeError):
            self._group.recv([torch.zeros(1)], self._peer, ABORT_TAG).wait(timedelta(milliseconds=1))
