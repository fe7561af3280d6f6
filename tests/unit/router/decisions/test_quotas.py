import pytest

from router.decisions.quotas import Exceeded, Grant, Kind, QuotaRules, Quotas
from router.decisions.tenants import Tenant

SHARED = QuotaRules(shared=True, lease_seconds=10.0, unleased_fraction=0.5)


def accepted(quotas: Quotas, number: int, *, tokens: int = 1, now: float = 0.0, prefix: str = "r") -> int:
    return sum(quotas.take(f"{prefix}{at}", "t", tokens, now) is None for at in range(number))


def test_a_tenant_without_quotas_is_never_refused_and_nothing_is_kept_of_it() -> None:
    quotas = Quotas([Tenant("t")])
    assert accepted(quotas, 1000) == 1000
    assert quotas.tenants == ()
    quotas.give_back("r1", 5)


def test_alone_a_rate_holds_a_minutes_worth_and_refills_by_the_second() -> None:
    quotas = Quotas([Tenant("t", requests_per_minute=60)])
    assert accepted(quotas, 100) == 60
    exceeded = quotas.take("x", "t", 1, 0.0)
    assert exceeded == Exceeded(Kind.REQUESTS, 60, 1.0, 0.0, 1.0)
    assert accepted(quotas, 100, now=5.0, prefix="s") == 5
    assert accepted(quotas, 100, now=10_000.0, prefix="u") == 60


def test_the_burst_is_bounded_by_the_rules() -> None:
    quotas = Quotas([Tenant("t", requests_per_minute=60)], QuotaRules(burst_seconds=10.0))
    assert accepted(quotas, 100) == 10
    assert accepted(quotas, 100, now=3.0, prefix="s") == 3


def test_tokens_are_taken_as_the_most_that_they_can_be_and_come_back_as_what_was_not_needed() -> None:
    quotas = Quotas([Tenant("t", tokens_per_minute=1000)])
    assert quotas.take("a", "t", 700, 0.0) is None
    exceeded = quotas.take("b", "t", 400, 0.0)
    assert exceeded is not None
    assert (exceeded.kind, exceeded.limit, exceeded.needed, exceeded.left) == (Kind.TOKENS, 1000, 400, 300)
    assert exceeded.retry_after_seconds == pytest.approx(6.0)
    quotas.give_back("a", 200)
    quotas.give_back("a", 0)
    assert quotas.take("b", "t", 800, 0.0) is None


def test_one_quota_that_is_exceeded_takes_nothing_of_the_others() -> None:
    quotas = Quotas([Tenant("t", requests_per_minute=2, max_concurrent=1)])
    assert quotas.take("a", "t", 1, 0.0) is None
    exceeded = quotas.take("b", "t", 1, 0.0)
    assert exceeded is not None
    assert exceeded.kind is Kind.CONCURRENCY
    quotas.give_back("a", 1)
    assert quotas.take("c", "t", 1, 0.0) is None, "the refused one did not cost a request"


def unheard(quotas: Quotas) -> Quotas:
    quotas.unheard("t", 0.0)
    return quotas


def test_nothing_is_spent_before_the_store_was_asked_and_a_part_where_it_does_not_answer() -> None:
    quotas = Quotas([Tenant("t", requests_per_minute=60, max_concurrent=100)], SHARED)
    assert accepted(quotas, 100) == 0
    unheard(quotas)
    assert accepted(quotas, 100) == 30
    assert accepted(quotas, 100, now=10.0, prefix="s") == 5
    quotas.unheard("t", 10.0)
    assert accepted(quotas, 100, now=10.0, prefix="u") == 0
    rates = {report.kind: report.minted for report in quotas.report("t", 10.0)}
    assert rates == {Kind.REQUESTS: 35.0, Kind.CONCURRENCY: 50.0}


def test_while_the_store_is_heard_only_what_it_grants_is_spent() -> None:
    quotas = Quotas([Tenant("t", requests_per_minute=60)], SHARED)
    quotas.granted("t", [Grant(Kind.REQUESTS, 4.0, 3, False)], 1.0)
    assert accepted(quotas, 100, now=9.0, prefix="s") == 4
    assert accepted(quotas, 100, now=10.9, prefix="u") == 0


def test_when_the_store_falls_silent_a_router_goes_on_at_its_part() -> None:
    quotas = Quotas([Tenant("t", requests_per_minute=60)], SHARED)
    quotas.granted("t", [Grant(Kind.REQUESTS, 0.0, 3, False)], 0.0)
    assert accepted(quotas, 1000, now=30.0, prefix="s") == 10
    assert accepted(quotas, 1000, now=10_000.0, prefix="u") == 20, "a third of a minute's worth, however long it was"
    (report,) = quotas.report("t", 10_000.0)
    assert report.minted == 30.0
    (report,) = quotas.report("t", 10_000.0)
    assert report.minted == 30.0, "until the store has heard of it"
    quotas.granted("t", [Grant(Kind.REQUESTS, 0.0, 3, False)], 10_000.0)
    (report,) = quotas.report("t", 10_000.0)
    assert report.minted == 0.0


def test_what_is_beyond_the_target_leaves_the_slice_with_the_report() -> None:
    quotas = unheard(Quotas([Tenant("t", requests_per_minute=90)], SHARED))
    (report,) = quotas.report("t", 0.0)
    assert (report.holding, report.given_back, report.target) == (45.0, 0.0, 90.0)
    quotas.granted("t", [Grant(Kind.REQUESTS, 45.0, 2, False)], 0.0)
    (report,) = quotas.report("t", 1.0)
    assert (report.holding, report.given_back, report.target) == (30.0, 60.0, 30.0)
    assert accepted(quotas, 100, now=1.0) == 30
    (report,) = quotas.report("t", 2.0)
    assert (report.holding, report.target, report.hungry) == (0.0, 90.0, True)
    (report,) = quotas.report("t", 3.0)
    assert (report.target, report.hungry) == (30.0, False)


def test_when_another_router_is_short_an_idle_one_keeps_little() -> None:
    quotas = unheard(Quotas([Tenant("t", requests_per_minute=90)], SHARED))
    quotas.granted("t", [Grant(Kind.REQUESTS, 45.0, 2, True)], 0.0)
    (report,) = quotas.report("t", 1.0)
    assert (report.holding, report.given_back) == (7.0, 83.0)


def test_slots_in_use_are_held_whatever_the_target() -> None:
    quotas = unheard(Quotas([Tenant("t", max_concurrent=8)], SHARED))
    assert accepted(quotas, 9) == 4
    quotas.granted("t", [Grant(Kind.CONCURRENCY, 0.0, 9, True)], 0.0)
    quotas.report("t", 0.0)
    (report,) = quotas.report("t", 1.0)
    assert (report.holding, report.given_back, report.target) == (4.0, 0.0, 4.0)
    for number in range(4):
        quotas.give_back(f"r{number}", 1)
    (report,) = quotas.report("t", 2.0)
    assert (report.holding, report.given_back) == (0.0, 4.0)


def test_small_quotas_are_served_from_the_first_request_on() -> None:
    quotas = unheard(Quotas([Tenant("t", requests_per_minute=1, max_concurrent=1)], SHARED))
    assert accepted(quotas, 3) == 1
