"""How a rank reads from all ranks of a peer: at once, and nothing of it goes on when it has failed."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest
import torch

from headrace.errors import HeadraceError, LinkClosed
from headrace.values import ParallelLayout
from workers.kv.layout import ModelShape, Piece, SlabLayout
from workers.kv.links import peers
from workers.kv.links.base import BlockPull, PeerRanks, PullReceipt
from workers.kv.links.peers import PeerLinks
from workers.kv.pool import KvPool

pytestmark = pytest.mark.torch

SHAPE = ModelShape(num_layers=2, num_kv_heads=2, head_dim=8, num_heads=2)
TWO = PeerRanks("p", 1, ParallelLayout(2, 1), ("first", "second"))


class Noted:
    """A link that notes what is asked of it, and fails where it is to."""

    closed = False

    def __init__(self, name: str, notes: list[str], failing: str) -> None:
        self._name, self._notes, self._failing = name, notes, failing

    def _note(self, what: str) -> None:
        self._notes.append(f"{what} {self._name}")
        if self._notes[-1] == self._failing:
            raise LinkClosed(f"link closed: {self._failing}")

    def begin(self, blocks: Sequence[BlockPull], piece: Piece, after_step: int = 0) -> Callable[[], PullReceipt]:
        self._note("begin")

        def end() -> PullReceipt:
            self._note("end")
            return PullReceipt(len(blocks), 100, 1.0 if self._name == "first" else 1.5)

        return end

    def pull(self, blocks: Sequence[BlockPull], piece: Piece, after_step: int = 0) -> PullReceipt:
        return self.begin(blocks, piece, after_step)()

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass


def outcome_of(monkeypatch: pytest.MonkeyPatch, failing: str = "") -> tuple[PullReceipt | HeadraceError, list[str]]:
    notes: list[str] = []
    monkeypatch.setattr(peers, "connect", lambda ours, theirs, pool, seconds: Noted(theirs, notes, failing))
    pool = KvPool(SlabLayout(2, 2, 4, 8, 4), 4, torch.float32, torch.device("cpu"))
    links = PeerLinks(pool, "ours", 0, ParallelLayout(1, 1), SHAPE, 10.0)
    outcome: Future[PullReceipt | HeadraceError] = Future()
    links.pull(TWO, [BlockPull(0, 0, 1)], outcome.set_result)
    found = outcome.result(10)
    links.close()
    return found, notes


def test_pulls_from_all_ranks_of_a_peer_begin_before_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, a rank's link stands still while another's begins and ends."""
    found, notes = outcome_of(monkeypatch)
    assert notes == ["begin first", "begin second", "end first", "end second"]
    assert found == PullReceipt(1, 200, 1.5), "no time counts twice"


@pytest.mark.parametrize(
    ("failing", "notes"),
    [
        ("begin first", ["begin first"]),
        ("begin second", ["begin first", "begin second", "end first"]),
        ("end first", ["begin first", "begin second", "end first", "end second"]),
    ],
)
def test_what_has_begun_is_over_when_another_pull_has_failed(
    monkeypatch: pytest.MonkeyPatch, failing: str, notes: list[str]
) -> None:
    found, seen = outcome_of(monkeypatch, failing)
    assert isinstance(found, LinkClosed)
    assert failing in str(found)
    assert seen == notes


def test_when_nobody_has_pulled_for_a_while_each_link_is_told_and_may_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would hold its staging for as long as both workers live."""
    told = {name: threading.Event() for name in TWO.endpoints}

    class Resting(Noted):
        def rest(self) -> None:
            told[self._name].set()

    monkeypatch.setattr(peers, "connect", lambda ours, theirs, pool, seconds: Resting(theirs, [], ""))
    monkeypatch.setattr(peers, "IDLE_SECONDS", 0.01)
    pool = KvPool(SlabLayout(2, 2, 4, 8, 4), 4, torch.float32, torch.device("cpu"))
    links = PeerLinks(pool, "ours", 0, ParallelLayout(1, 1), SHAPE, 10.0)
    outcome: Future[PullReceipt | HeadraceError] = Future()
    links.pull(TWO, [BlockPull(0, 0, 1)], outcome.set_result)
    assert isinstance(outcome.result(10), PullReceipt)
    assert all(each.wait(10) for each in told.values())
    links.close()


def test_what_waits_behind_a_pull_from_a_peer_that_is_closed_forms_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would close it: who closed the peer's has taken them all."""
    reading, go_on, made = threading.Event(), threading.Event(), list[str]()

    class Reading(Noted):
        def _note(self, what: str) -> None:
            reading.set()
            go_on.wait(10)

    def connect(ours: str, theirs: str, pool: KvPool, seconds: float) -> Reading:
        made.append(theirs)
        return Reading(theirs, [], "")

    monkeypatch.setattr(peers, "connect", connect)
    pool = KvPool(SlabLayout(2, 2, 4, 8, 4), 4, torch.float32, torch.device("cpu"))
    links = PeerLinks(pool, "ours", 0, ParallelLayout(1, 1), SHAPE, 10.0)
    outcomes = [Future[PullReceipt | HeadraceError]() for _ in range(2)]
    one = PeerRanks("p", 1, ParallelLayout(1, 1), ("only",))
    for outcome in outcomes:
        links.pull(one, [BlockPull(0, 0, 1)], outcome.set_result)
    assert reading.wait(10)
    links.close_peer(one.key)
    go_on.set()
    assert "were closed from this side" in str(outcomes[1].result(10))
    assert made == ["only"]
    links.close()


def test_a_link_that_closed_is_formed_anew_by_the_next_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    """It closed for nobody pulled, say: the peer is as well as ever."""
    made: list[Noted] = []

    def connect(ours: str, theirs: str, pool: KvPool, seconds: float) -> Noted:
        made.append(Noted(theirs, [], ""))
        return made[-1]

    monkeypatch.setattr(peers, "connect", connect)
    pool = KvPool(SlabLayout(2, 2, 4, 8, 4), 4, torch.float32, torch.device("cpu"))
    links = PeerLinks(pool, "ours", 0, ParallelLayout(1, 1), SHAPE, 10.0)
    one = PeerRanks("p", 1, ParallelLayout(1, 1), ("only",))
    for num_made in (1, 1, 2):
        outcome: Future[PullReceipt | HeadraceError] = Future()
        links.pull(one, [BlockPull(0, 0, 1)], outcome.set_result)
        assert isinstance(outcome.result(10), PullReceipt)
        assert len(made) == num_made
        made[0].closed = made[0]._notes.count("end only") == 2
    links.close()
