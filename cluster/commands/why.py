"""`headrace why`: why a request ran where it ran, and what became of it, as its router remembers it."""

import json
import re
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import click
import httpx
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.commands.screen import screen
from cluster.commands.status import read
from cluster.commands.tls_options import tls_options
from headrace.errors import ConfigError, HeadraceError, InternalError, InvalidRequest, Unauthenticated, Unavailable
from headrace.metrics import Stage
from headrace.tls import ClientTls
from router.decisions.codec import decode
from router.decisions.placement import Candidate, Pair, Why
from router.explanations import Explanation

BUDGET_SECONDS = 5.0
MAX_ROWS = 16
URL = re.compile(r"https?://[^/\s]+(/\S*)?")
STAGES = {
    Stage.EDGE: "edge: checked and tokenised",
    Stage.QUEUE: "queue in the router",
    Stage.PLACEMENT: "placed and submitted",
    Stage.RETRY: "attempts that failed",
    Stage.WORKER_QUEUE: "queue at the first worker",
    Stage.TICKET_WAIT: "ticket's wait at the prefill worker",
    Stage.PREFILL: "prefill",
    Stage.TRANSFER: "hand-off, not hidden",
    Stage.JOIN: "joined to the batch",
    Stage.FIRST_TOKEN: "first token: wire and relay",
}


@click.command(name="why")
@click.argument("request_id")
@click.option("--cluster", help="The cluster's name; not needed when there is one.")
@click.option(
    "--router",
    "routers",
    multiple=True,
    metavar="URL",
    help="Routers to ask instead; may be given often: until one knows.",
)
@click.option("--api-key", envvar="HEADRACE_API_KEY", help="Or $HEADRACE_API_KEY; where routers have keys.")
@tls_options
@click.option("--all", "with_all", is_flag=True, help="Every candidate, also those that were far from the best.")
@click.option("--json", "as_json", is_flag=True, help="The whole explanation, as one object.")
def command(
    request_id: str,
    cluster: str | None,
    routers: tuple[str, ...],
    api_key: str | None,
    tls: ClientTls | None,
    with_all: bool,
    as_json: bool,
) -> None:
    """Explain request REQUEST_ID (X-Request-Id, or the id of its answer): the workers that were compared, what was
    predicted of each, the pairs and their prices, the choice; then what happened.

    A router remembers those that run and the last 512 that ended.
    """
    if not routers:
        session = read(cluster)
        routers, tls = (session.http_url,), tls or session.client_tls
    for router in routers:
        if not URL.fullmatch(router):
            raise ConfigError.out_of_range("--router", router, "http://HOST:PORT or https://HOST:PORT of a router")
    found = ask(routers, request_id, api_key, tls)
    if as_json:
        click.echo(json.dumps(found))
        return
    try:
        explanation = decode(Explanation, found)
    except ValueError as error:
        raise InternalError(f"the router is of another version (--json shows what it says): {error}") from error
    screen().print(render(explanation, num_rows=None if with_all else MAX_ROWS))


def ask(routers: Sequence[str], request_id: str, api_key: str | None, tls: ClientTls | None = None) -> Any:
    """What the first router that knows the request says. One that does not answer hides nothing that another knows."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    silent: HeadraceError | None = None
    tls = tls or ClientTls()
    with httpx.Client(headers=headers, timeout=BUDGET_SECONDS, trust_env=False, verify=tls.context()) as client:
        for router in routers:
            try:
                url = f"{router.rstrip('/')}/why/{quote(request_id, safe='')}"
                response = client.get(url, extensions=tls.extensions)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                silent = Unavailable(f"{router} does not answer: {error}")
                continue
            if response.status_code == 200:
                return response.json()
            if response.status_code == 401:
                if "certificate" in response.text:
                    raise Unauthenticated(f"{router} needs a client certificate: give --client-cert-file and its key")
                raise Unauthenticated(f"{router} needs an API key: give --api-key or set $HEADRACE_API_KEY")
            if response.status_code != 404:
                silent = Unavailable(f"{router} answered with status {response.status_code}")
    raise silent or InvalidRequest(f"no router knows request {request_id!r}, or no longer", field="request_id")


def render(explanation: Explanation, num_rows: int | None = MAX_ROWS) -> RenderableType:
    usage = explanation.usage
    counts = f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated"
    revision = f", by revision {explanation.revision}" if explanation.revision else ""
    parts: list[RenderableType] = [Text(f"{explanation.request_id}  {explanation.outcome}: {counts}{revision}")]
    if explanation.worker_name:
        parts.append(Text(f"  its workers know it as {explanation.worker_name}"))
    if not explanation.whys:
        parts.append(Text("  it was never placed"))
    for number, why in enumerate(explanation.whys):
        parts += [Text(), Text(_title(number, len(explanation.whys), why), style="bold"), _candidates(why, num_rows)]
        if why.pairs:
            parts.append(_pairs(why))
        parts += [
            Text(f"  failed: {failure.worker_id}: {failure.error}: {failure.message}", style="red")
            for failure in explanation.failures
            if failure.placement == number
        ]
    if explanation.whys:
        parts += [Text(), Text("what happened", style="bold"), _outcome(explanation)]
    return Group(*parts)


def _title(number: int, num: int, why: Why) -> str:
    ask, chosen = why.ask, why.chosen
    title = f"placement {number + 1} of {num}: "
    if chosen is None:
        return f"{title}nowhere, {why.reason}"
    notes = [REASONS.get(why.reason, why.reason)]
    if why.num_near_equals > 1:
        notes.append(f"drawn among {why.num_near_equals} near-equals")
    if why.slo:
        notes.append(TARGETS[why.slo])
    if ask.decode is not None:
        notes.append("the decode worker had it already")
    if ask.excluded:
        notes.append(f"without {', '.join(sorted(ask.excluded))}")
    return f"{title}{_way(chosen)}  ({'; '.join(notes)})"


REASONS = {
    "pair": "prefill and decode apart",
    "unified": "one worker for both",
    "alone": "decode prefills: little is left to compute, it holds more, or prefill is busy",
    "no_prefill_workers": "nobody prefills just now: decode does it",
}

TARGETS = {"met": "expected to meet its targets", "missed": "its targets may be missed"}


def _way(pair: Pair) -> str:
    return f"{pair.prefill} → {pair.decode}" if pair.prefill is not None else f"{pair.decode} alone"


def _candidates(why: Why, num_rows: int | None) -> RenderableType:
    """Those in a pair first, then by what they would cost; the refused last, with the reason."""
    in_pairs = {("decode", pair.decode) for pair in why.pairs} | {("prefill", pair.prefill) for pair in why.pairs}

    def rank(candidate: Candidate) -> tuple[bool, bool, str, float]:
        apart = (candidate.role, candidate.worker_id) not in in_pairs
        cost = candidate.wait_seconds + candidate.prefill_seconds
        return candidate.refused is not None, apart, candidate.role, cost

    candidates = sorted(why.candidates, key=rank)
    shown = candidates[:num_rows]
    table = _table(left=("CANDIDATE", "ROLE"), right=("CACHED", "UNCACHED", "WAIT", "PREFILL", "TPOT JOINED", ""))
    for candidate in shown:
        uncached = why.ask.num_prompt_tokens - candidate.cached_tokens
        figures = [
            str(candidate.cached_tokens),
            str(uncached),
            _ms(candidate.wait_seconds),
            _ms(candidate.prefill_seconds),
        ]
        figures.append(_ms(candidate.tpot_seconds) if candidate.role == "decode" else "")
        if candidate.refused is not None:
            table.add_row(
                candidate.worker_id, candidate.role, *[""] * 5, f"passed over: {candidate.refused}", style="dim"
            )
        else:
            table.add_row(candidate.worker_id, candidate.role, *figures, "")
    if len(shown) == len(candidates):
        return table
    return Group(table, Text(f"  and {len(candidates) - len(shown)} more (--all)", style="dim"))


def _pairs(why: Why) -> Table:
    others = ("STALLS OTHERS", "OTHERS MISS") if why.slo else ("STALLS OTHERS",)
    table = _table(left=("COMPARED",), right=("TTFT", "TRANSFER", "PULLED", "TPOT", *others, "PRICE"))
    for pair in sorted(why.pairs, key=lambda pair: pair.price_seconds):
        marked = pair == why.chosen
        table.add_row(
            f"{_way(pair)}{'  ← chosen' if marked else ''}",
            _ms(pair.ttft_seconds),
            _ms(pair.transfer_seconds),
            str(pair.pulled_tokens),
            _ms(pair.tpot_seconds),
            _ms(pair.stall_seconds),
            *([f"{pair.num_missed:.2f}"] if why.slo else ()),
            _ms(pair.price_seconds),
            style="green" if marked else "",
        )
    return table


def _outcome(explanation: Explanation) -> Table:
    """The last placement's prediction beside what came; what a worker measured is known once the request has finished."""
    chosen, source = explanation.whys[-1].chosen, _prefilled_by(explanation)
    timeline, worker = explanation.timeline, explanation.timeline.worker
    finished = explanation.outcome == "finished"
    table = _table(left=("",), right=("PREDICTED", "ACTUAL"))
    if chosen is not None and source is not None:
        pulled = chosen.pulled_tokens if source.role == "prefill" else 0
        ran_on = (worker.prefill_worker or timeline.decode_worker, timeline.decode_worker)
        for name, predicted, actual in (
            ("prefilled by", chosen.prefill or chosen.decode, ran_on[0]),
            ("decoded by", chosen.decode, ran_on[1]),
            ("cached tokens", str(source.cached_tokens + pulled), str(explanation.usage.cached_tokens)),
            ("queue at the workers", _ms(source.wait_seconds), _ms(worker.queue_seconds)),
            ("prefill", _ms(source.prefill_seconds), _ms(worker.prefill_seconds)),
            ("transfer not hidden", _ms(chosen.transfer_seconds), _ms(worker.transfer_exposed_seconds)),
        ):
            table.add_row(name, predicted, actual if finished else "")
        table.add_row("TTFT at the workers", _ms(chosen.ttft_seconds), "")
        table.add_row("TPOT", _ms(chosen.tpot_seconds), _ms(explanation.tpot_seconds))
    if not timeline.ttft_stages:
        table.add_row("queue in the router", "", _ms(timeline.router_queue_seconds))
    for stage, seconds in timeline.ttft_stages.items():
        table.add_row(f"  {STAGES[Stage(stage)]}", "", _ms(seconds))
    table.add_row("TTFT from its arrival on", "", _ms(explanation.ttft_seconds))
    table.add_row("in all", "", _ms(explanation.seconds))
    table.add_row("attempts", "", str(timeline.attempts))
    return table


def _prefilled_by(explanation: Explanation) -> Candidate | None:
    """The candidate whose part the prompt was: a decode worker with little left to compute does it itself, whatever the
    placement. While it runs, the one that was chosen."""
    why, worker = explanation.whys[-1], explanation.timeline.worker
    if why.chosen is None:
        return None
    handed_off = worker.prefill_worker != "" if explanation.outcome == "finished" else why.chosen.prefill is not None
    role = "prefill" if handed_off and why.chosen.prefill is not None else "decode"
    name = why.chosen.prefill if role == "prefill" else why.chosen.decode
    return next(candidate for candidate in why.candidates if (candidate.worker_id, candidate.role) == (name, role))


def _table(left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=True, padding=(0, 2))
    for column in left:
        table.add_column(column, no_wrap=True)
    for column in right:
        table.add_column(column, no_wrap=True, justify="right")
    return table


def _ms(seconds: float | None) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds is not None else ""
