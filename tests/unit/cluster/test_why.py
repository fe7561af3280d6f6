"""`headrace why` before real HTTP servers that play routers: which is asked, and what a person reads."""

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import pytest
from click.testing import CliRunner

from cluster.commands.why import ask, command
from headrace.errors import InvalidRequest, Unauthenticated, Unavailable
from headrace.values import Load, Timeline, Usage
from router.decisions.codec import encode
from router.decisions.ledger import Beside
from router.decisions.placement import Ask, place
from router.decisions.view import View
from router.explanations import Explanation, Failure
from router.stages import RequestTimeline
from tests.unit.router.decisions.placing import d, p


class Routers:
    """HTTP servers that know some requests each; they end with the test."""

    def __init__(self) -> None:
        self._servers: list[ThreadingHTTPServer] = []

    def knowing(self, known: Mapping[str, Any], status: int = 404) -> str:
        """The URL of a router; `status` is its answer to requests that it does not know."""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = known.get(unquote(self.path.removeprefix("/why/")))
                body = json.dumps(found if found is not None else {"error": {}}).encode()
                self.send_response(200 if found is not None else status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self._servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    def gone(self) -> str:
        url = self.knowing({})
        self._servers[-1].shutdown()
        self._servers.pop().server_close()
        return url

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()


@pytest.fixture
def routers() -> Iterator[Routers]:
    routers = Routers()
    yield routers
    routers.close()


BUSY = d("d1", load=Load(num_running=40, context_tokens=40_000))


def explanation() -> Explanation:
    """First on (d1, p1), which fails; then prefilled by p2, where 32 tokens were promised and none were found."""
    workers = (p("p1"), p("p2", load=Load(waiting_prefill_tokens=9000)), p("p3", draining=True), BUSY)
    first = place(Ask(1000, 100, cached_tokens={"p2": 32}), View(workers), 0.0).why
    again = Ask(1000, 100, cached_tokens={"p2": 32}, decode="d1", excluded=frozenset({"p1"}))
    second = place(again, View(workers), 1.0).why
    failure = Failure(0, "p1", "TransferFailed", "the link closed")
    timeline = RequestTimeline(Timeline(0.002, 1.3, 0.004, 2.0, "p2", 3, 4096), 0.25, "d1", 2)
    return Explanation("mine", (first, second), (failure,), "finished", Usage(1000, 7, 0), timeline, 4.0, 1.75, 0.3)


def test_routers_are_asked_until_one_knows(routers: Routers) -> None:
    knows = routers.knowing({"a/b": {"request_id": "a/b"}})
    asked = (routers.knowing({}), routers.gone(), routers.knowing({}, status=503), knows + "/")
    assert ask(asked, "a/b", None) == {"request_id": "a/b"}


def test_what_none_knows_is_an_error_that_says_whether_one_was_silent(routers: Routers) -> None:
    with pytest.raises(InvalidRequest, match="no router knows request 'x', or no longer"):
        ask((routers.knowing({}), routers.knowing({})), "x", None)
    with pytest.raises(Unavailable, match="does not answer"):
        ask((routers.gone(), routers.knowing({})), "x", None)
    with pytest.raises(Unauthenticated, match="HEADRACE_API_KEY"):
        ask((routers.knowing({}, status=401),), "x", None)


def rows(text: str) -> dict[str, list[str]]:
    """The cells of each line, by its first words."""
    cells = [[cell.strip() for cell in line.strip().split("  ") if cell.strip()] for line in text.splitlines()]
    return {row[0]: row[1:] for row in cells if row}


def test_a_person_reads_who_was_compared_what_was_predicted_and_what_came(routers: Routers) -> None:
    ran = CliRunner().invoke(command, ["mine", "--router", routers.knowing({"mine": encode(explanation())})])
    assert ran.exit_code == 0, ran.output
    first, second = ran.output.split("placement 2 of 2: ")
    assert first.startswith("mine  finished: 1000 prompt tokens, 7 generated")
    assert "placement 1 of 2: p1 → d1  (prefill and decode apart)" in first
    assert "  failed: p1: TransferFailed: the link closed" in first
    assert rows(first)["p1"] == ["prefill", "0", "1000", "0.0 ms", "1,010.0 ms"]
    assert rows(first)["p2"] == ["prefill", "32", "968", "9,050.0 ms", "978.0 ms"]
    assert rows(first)["p3"] == ["prefill", "passed over: draining"]
    assert rows(first)["d1"][:4] == ["decode", "0", "1000", "0.0 ms"]
    assert len(rows(first)["d1"]) == 6  # TPOT after joining
    assert "p1 → d1  ← chosen" in first

    assert second.startswith("p2 → d1  (prefill and decode apart; the decode worker had it already; without p1)")
    happened = rows(second.split("what happened")[1])
    assert happened["prefilled by"] == ["p2", "p2"]
    assert happened["cached tokens"] == ["32", "0"]
    assert happened["queue at the workers"] == ["9,050.0 ms", "2.0 ms"]
    assert happened["prefill"] == ["978.0 ms", "1,300.0 ms"]
    assert happened["queue in the router"] == ["250.0 ms"]
    assert happened["TTFT from its arrival on"] == ["1,750.0 ms"]
    assert happened["TPOT"][1] == "300.0 ms"
    assert happened["attempts"] == ["2"]


def test_a_way_that_others_would_pay_for_shows_how_many_of_them_miss(routers: Routers) -> None:
    """It was explained as expected to meet its targets, since a way that was not taken would have."""
    ask = Ask(1000, 100, ttft_seconds=2.5, tpot_seconds=0.115)
    slow = p("p1", load=Load(num_waiting=1, waiting_prefill_tokens=1900))
    why = place(ask, View((slow, replace(BUSY, beside=Beside(0.0, 128.0)))), 0.0).why
    alone = next(pair for pair in why.pairs if pair.prefill is None)
    assert why.chosen is not None
    assert why.chosen.prefill == "p1"
    assert alone.num_missed > 1
    assert why.slo == "missed", "it waits longer than its target, where alone it would not"
    timeline = RequestTimeline(Timeline(), 0.0, "d1", 1)
    whole = Explanation("t", (why,), (), "cancelled", Usage(1000), timeline, 1.0, None, None)
    said = CliRunner().invoke(command, ["t", "--router", routers.knowing({"t": encode(whole)})]).output
    assert "p1 → d1  (prefill and decode apart; its targets may be missed)" in said
    assert rows(said)["d1 alone"][-2] == f"{alone.num_missed:.2f}"


def test_of_many_candidates_those_that_were_compared_are_shown_and_all_on_demand(routers: Routers) -> None:
    workers = (*(p(f"p{at}", load=Load(waiting_prefill_tokens=100 * (49 - at))) for at in range(50)), d("d"))
    why = place(Ask(1000, 100), View(workers), 0.0).why
    whole = Explanation(
        "m", (why,), (), "cancelled", Usage(1000), RequestTimeline(Timeline(), 0.0, "d", 1), 1.0, None, None
    )
    url = routers.knowing({"m": encode(whole)})
    short = CliRunner().invoke(command, ["m", "--router", url]).output
    assert "and 35 more (--all)" in short
    assert {"p49", "p48", "p47", "p46", "d"} <= rows(short).keys()
    assert "p0" not in rows(short)
    assert {f"p{at}" for at in range(50)} <= rows(
        CliRunner().invoke(command, ["m", "--router", url, "--all"]).output
    ).keys()


def test_a_request_that_was_refused_before_any_placement_says_so(routers: Routers) -> None:
    timeline = RequestTimeline(Timeline(), 0.0, "", 1)
    shed = Explanation("s", (), (), "Overloaded", Usage(10), timeline, 0.0, None, None)
    nobody = place(Ask(10, 10), View(()), 0.0).why
    lost = Explanation("n", (nobody,), (), "NoWorkers", Usage(10), timeline, 0.0, None, None)
    url = routers.knowing({"s": encode(shed), "n": encode(lost)})
    assert "Overloaded: 10 prompt tokens" in (said := CliRunner().invoke(command, ["s", "--router", url]).output)
    assert "it was never placed" in said
    assert "placement 1 of 1: nowhere, nobody decodes" in CliRunner().invoke(command, ["n", "--router", url]).output


def test_json_is_the_whole_of_it(routers: Routers) -> None:
    data = encode(explanation())
    ran = CliRunner().invoke(command, ["mine", "--router", routers.knowing({"mine": data}), "--json"])
    assert json.loads(ran.output) == data
