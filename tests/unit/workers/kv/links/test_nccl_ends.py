"""How what waits in NCCL ends: from outside, at once, whatever NCCL does. A communicator in memory takes its place, which
waits for ever, as one does whose peer is gone."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from headrace.errors import LinkClosed
from workers.kv.links.closing import Closing
from workers.kv.links.staged import SOURCE, TARGET

pytestmark = pytest.mark.torch


class Options:
    def __init__(self, *, is_high_priority_stream: bool) -> None:
        self.config = SimpleNamespace()


class Communicator:
    """`forms`, `aborts`: what the first message, or an abort, waits for. `aborted`: the thread that did."""

    made: "list[Communicator]"
    forms = threading.Event()
    aborts = threading.Event()

    def __init__(self, store: object, me: int, size: int, options: Options) -> None:
        self.aborted: str | None = None
        self.asked = threading.Event()
        self.made.append(self)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> "Communicator":
        self.forms.wait(20)
        return self

    recv = send

    def is_completed(self) -> bool:
        """As a work of NCCL's: an abort completes it."""
        self.asked.set()
        return self.aborted is not None

    def abort(self) -> None:
        self.aborts.wait(20)
        self.aborted = threading.current_thread().name


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    nccl: ModuleType = pytest.importorskip("workers.kv.links.nccl", reason="triton is not installed")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Communicator, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(Communicator, "made", [], raising=False)
    monkeypatch.setattr(Communicator, "Options", Options, raising=False)
    for name in ("forms", "aborts"):
        event = threading.Event()
        event.set()
        monkeypatch.setattr(Communicator, name, event)
    yield nccl
    Communicator.forms.set()
    Communicator.aborts.set()


def a_pair(nccl: ModuleType, closing: Closing, me: int = TARGET, seconds: float = 60.0) -> Any:
    return nccl.NcclPair(torch.device("cpu"), SimpleNamespace(closing=closing, store=None), me, seconds)


@pytest.mark.parametrize("me", [SOURCE, TARGET])
def test_a_message_that_never_comes_ends_with_its_link_and_its_communicator_is_aborted(
    nccl: ModuleType, me: int
) -> None:
    closing = Closing()
    pair = a_pair(nccl, closing, me)
    (communicator,) = Communicator.made
    Communicator.aborts.clear()
    pair.staging.append(torch.zeros(1))
    with ThreadPoolExecutor(1) as waiting:
        ending = waiting.submit(pair.finish, communicator)
        assert communicator.asked.wait(10)
        closing.close("the control plane says so")
        abort = next((thread for thread in threading.enumerate() if thread.name == "link-abort"), None)
        try:
            with pytest.raises(LinkClosed, match="the control plane says so"):
                ending.result(10)
            assert pair.staging, "what NCCL may still write is given to nobody before the abort is over"
        finally:
            Communicator.aborts.set()
    assert abort is not None
    abort.join(10)
    assert communicator.aborted == "link-abort"
    assert not pair.staging


def test_a_message_that_takes_too_long_closes_its_link(nccl: ModuleType) -> None:
    closing = Closing()
    pair = a_pair(nccl, closing, seconds=0.01)
    with ThreadPoolExecutor(1) as waiting:
        ending = waiting.submit(pair.finish, Communicator.made[0])
        try:
            with pytest.raises(LinkClosed, match=r"a message took more than 0\.01 s"):
                ending.result(10)
        finally:
            closing.close("the test is over")
    assert closing.closed


def test_what_an_abort_completed_did_not_come(nccl: ModuleType) -> None:
    closing = Closing()
    pair = a_pair(nccl, closing)
    (communicator,) = Communicator.made
    communicator.abort()
    closing.close("the peer is gone")
    with pytest.raises(LinkClosed, match="the peer is gone"):
        pair.finish(communicator)


def test_one_whose_peer_never_comes_is_aborted_while_it_forms(nccl: ModuleType) -> None:
    """NCCL forms a communicator with its first message, in a call that nothing interrupts."""
    closing = Closing()
    Communicator.forms.clear()
    with ThreadPoolExecutor(1) as forming:
        made = forming.submit(a_pair, nccl, closing)
        while not Communicator.made:
            assert not made.done()
        closing.close("closed from this side")
        with pytest.raises(LinkClosed, match="closed from this side"):
            made.result(10)
        (communicator,) = Communicator.made
        for abort in [thread for thread in threading.enumerate() if thread.name == "link-abort"]:
            abort.join(10)
        assert communicator.aborted == "link-abort"
        Communicator.forms.set()


def test_a_link_holds_memory_that_is_missed_elsewhere_and_so_closes_when_nobody_pulls(nccl: ModuleType) -> None:
    transport = nccl.link("nccl://token@127.0.0.1:1", None, 10.0)._transport
    assert transport.dear
