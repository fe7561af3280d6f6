"""Reads over a link: latency and bandwidth; two at once from a peer; a port is shared by all that read through it."""

from headrace.costmodel import CostModel
from workers.virtual.link import Link, Port
from workers.virtual.time import VirtualTime

COST = CostModel(transfer_base_seconds=0.5, transfer_bytes_per_second=100.0)


def test_a_read_takes_latency_and_its_bytes() -> None:
    time, seen = VirtualTime(), list[tuple[float, float]]()
    link = Link(time, COST, Port(), Port())
    link.read(200, lambda: True, lambda seconds: seen.append((time.now, seconds)))
    time.run()
    assert seen == [(2.5, 2.5)]


def test_bytes_pass_a_port_one_after_the_other_and_latencies_overlap() -> None:
    time, seen = VirtualTime(), list[float]()
    source = Port()
    for _ in range(2):  # two pullers, one source
        Link(time, COST, source, Port()).read(100, lambda: True, lambda seconds: seen.append(seconds))
    time.run()
    assert seen == [1.5, 2.5]


def test_of_one_peer_two_reads_at_once_and_one_that_is_not_wanted_any_more_is_passed_over() -> None:
    time, begun = VirtualTime(), list[tuple[float, int]]()
    link = Link(time, COST, Port(), Port())

    def reader(number: int) -> None:
        def begin() -> bool:
            begun.append((time.now, number))
            return number != 2

        link.read(100, begin, lambda seconds: None)

    for number in range(4):
        reader(number)
    time.run()
    assert begun == [(0.0, 0), (0.0, 1), (1.5, 2), (1.5, 3)]
