"""What is said of replays of which some took much longer than others."""

from loadtests.disturbed import disturbed


def nothing(names: str) -> str:
    return ""


def test_replays_that_all_take_as_long_are_not_disturbed_however_long() -> None:
    assert disturbed([4.2, 4.3, 4.25, 4.4] * 4, nothing) == ""
    assert disturbed([1.0, 9.0], nothing) == "", "two say nothing of each other"


def test_short_replays_that_another_process_holds_up_in_turn() -> None:
    """As measured on a shared H200: 0.26 and 0.77 of the copy rate in turn, where alone all had 0.77."""
    durations = [1 / each for each in (0.777, 0.267, 0.26, 0.741, 0.256, 0.256, 0.758, 0.26, 0.26, 0.771)]
    answers = {
        "compute-apps=pid,used_memory": "11, 90 MiB\n12, 70 MiB\n",
        "gpu=clocks.sm,clocks.mem,clocks_event_reasons.active": "1980 MHz, 3201 MHz, 0x0\n",
    }
    assert disturbed(durations, answers.__getitem__) == (
        "6 of 10 took 2.97 times as long (.ss.ss.ss.), 2 processes on the devices of this host, "
        "clocks and reasons 1980 MHz, 3201 MHz, 0x0"
    )
    assert disturbed(durations, nothing).endswith("(.ss.ss.ss.)")
