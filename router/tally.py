"""Counters of one router since it started, taken where the metrics are: what its report says (headrace.reports). Pure."""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from heapq import nlargest

from headrace.reports import ClassCounts, RevisionCounts, RouterReport, bucket_of
from router.decisions.tenants import NO_CLASS
from router.flight import Flight
from router.jobs import Job

# Outcomes of what no number of workers would have served.
_DENIED = frozenset({"QuotaExceeded", "InvalidRequest", "ContextLengthExceeded"})
MAX_PAIRS = 1024  # those used most: a report stays small though every worker once handed over to every other
_VERDICTS = {"met": "met", "ttft": "missed_ttft", "tpot": "missed_tpot", "both": "missed_both", "failed": "failed"}


@dataclass(slots=True)
class Tally:
    """Counters of one router since its start. Owned by its Requests."""

    arrivals: int = 0
    prompt_tokens: int = 0
    denied: int = 0
    denied_tokens: int = 0
    max_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    ended: int = 0
    ttft_seconds: float = 0.0
    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    verdicts: Counter[tuple[str, str]] = field(default_factory=Counter)
    canary: int = 0
    canary_at: float = 0.0  # when the last counted one of it began
    revisions: dict[str, RevisionCounts] = field(default_factory=dict)

    def arrived(self, job: Job) -> None:
        self.arrivals += 1
        self.prompt_tokens += len(job.prompt_token_ids)
        self.max_tokens += job.sampling.max_tokens * job.n

    def finished(self, flight: Flight, now: float) -> None:
        """The request is over, whichever way."""
        self.ended += 1
        self.generated_tokens += flight.num_generated
        if flight.ttft_seconds is not None:
            cached = flight.cached_tokens
            self.cached_tokens += cached
            self.computed_tokens += len(flight.job.prompt_token_ids) - cached
            self.ttft_seconds += flight.ttft_seconds
        if flight.revision and flight.placed is not None and flight.outcome not in (*_DENIED, "cancelled"):
            self._of_revision(flight, now)
        if flight.outcome == "finished":
            self.pairs[flight.handed_over_by, flight.decode] += 1
        if flight.outcome in _DENIED:
            self.denied += 1
            self.denied_tokens += len(flight.job.prompt_token_ids)
        elif not flight.beside and (verdict := flight.verdict(now)) is not None:
            name = flight.job.service_class
            self.verdicts["" if name == NO_CLASS else name, _VERDICTS[verdict]] += 1

    def _of_revision(self, flight: Flight, now: float) -> None:
        """Once a request, while there is a canary. What one revision gave up and another answered is the former's failure,
        and its time is neither's."""
        if flight.canary != self.canary:
            # By time and not by number: those begin anew where Redis was flushed.
            if flight.marks.began < self.canary_at:
                return
            self.canary, self.revisions = flight.canary, {}
        self.canary_at = max(self.canary_at, flight.marks.began)
        name = flight.given_up_by or flight.revision
        verdict = flight.verdict(now)
        if verdict is None and not flight.given_up_by:
            return  # its client's own deadline says nothing of who served him
        counts = RevisionCounts(ended=1, failed=int(bool(flight.given_up_by) or verdict == "failed"))
        if not counts.failed:
            usage, tpot = flight.usage(), flight.tpot_seconds(now)
            counts = RevisionCounts(
                1,
                met=int(verdict == "met"),
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                generated_tokens=flight.num_generated,
                ttft={bucket_of(flight.ttft_seconds): 1} if flight.ttft_seconds is not None else {},
                tpot={bucket_of(tpot): 1} if tpot is not None else {},
            )
        self.revisions[name] = self.revisions.get(name, RevisionCounts()).plus(counts)

    def forget(self, worker_id: str) -> None:
        for pair in [pair for pair in self.pairs if worker_id in pair]:
            del self.pairs[pair]

    def report(self, router_id: str, flights: Collection[Flight], now: float) -> RouterReport:
        """Without the address, which is not known here."""
        waiting = [flight for flight in flights if flight.state == "queued"]
        classes: dict[str, ClassCounts] = {}
        for (name, verdict), number in self.verdicts.items():
            classes[name] = replace(classes.get(name, ClassCounts()), **{verdict: number})
        return RouterReport(
            router_id,
            "",
            now,
            self.arrivals,
            self.prompt_tokens,
            self.max_tokens,
            self.computed_tokens,
            self.cached_tokens,
            self.generated_tokens,
            self.ended,
            in_flight=len(flights) - len(waiting),
            queued=len(waiting),
            queued_tokens=sum(len(flight.job.prompt_token_ids) for flight in waiting),
            oldest_queued_seconds=max((now - flight.marks.began for flight in waiting), default=0.0),
            ttft_seconds=self.ttft_seconds,
            denied=self.denied,
            denied_tokens=self.denied_tokens,
            classes=classes,
            pairs=dict(nlargest(MAX_PAIRS, self.pairs.items(), key=lambda item: item[1])),
            canary=self.canary,
            revisions=dict(self.revisions),
        )
