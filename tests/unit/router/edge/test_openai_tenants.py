"""Whose request it is, and who is told of it: keys, tenants, classes, quotas, /why and /requests of the HTTP edge."""

from dataclasses import replace

import httpx
import pytest

from headrace.clock import ManualClock
from headrace.errors import QuotaExceeded
from headrace.values import Role, Timeline, Usage
from router.decisions.codec import decode
from router.decisions.placement import Ask, place
from router.decisions.tenants import Targets, Tenancy, Tenant
from router.decisions.view import View
from router.explanations import Explanation
from router.stages import RequestTimeline
from tests.unit.router.decisions.placing import worker
from tests.unit.router.edge.edges import CHAT, COMPLETION, client_of
from tests.unit.router.scripted import Scripted


async def test_case_70_keys_guard_the_api_and_nothing_that_probes_ask(core: Scripted, clock: ManualClock) -> None:
    async with client_of(core, clock, api_keys=("k1", "k2")) as client:
        for path in ("/health", "/ready", "/metrics"):
            assert (await client.get(path)).status_code == 200
        for header in ({}, {"Authorization": "Bearer no"}, {"Authorization": "k1"}, {"Authorization": "Basic k1"}):
            response = await client.get("/v1/models", headers=header)
            assert (response.status_code, bool(response.headers["x-request-id"])) == (401, True)
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert (await client.get("/v1/models", headers={"Authorization": "Bearer k2"})).status_code == 200


def explanation(request_id: str) -> Explanation:
    ask, view = Ask(1000, 100), View((worker("p", Role.PREFILL), worker("d", Role.DECODE)))
    whys = (place(ask, view, 0.0).why,)
    timeline = RequestTimeline(Timeline(prefill_worker="p"), 0.25, "d", 1)
    return Explanation(request_id, whys, (), "finished", Usage(1000, 2, 32), timeline, 2.0, 1.5, 0.5)


@pytest.mark.parametrize("asked", ["a/b", "chatcmpl-a/b", "cmpl-a/b"])
async def test_why_tells_operators_of_a_request_by_its_id_or_that_of_its_answer(
    core: Scripted, clock: ManualClock, asked: str
) -> None:
    core.explanations["a/b"] = explanation("a/b")
    async with client_of(core, clock) as client:
        response = await client.get(f"/why/{asked}")
        assert response.status_code == 200
        assert decode(Explanation, response.json()) == explanation("a/b")


async def test_a_client_s_own_id_may_begin_like_an_answer_s(core: Scripted, clock: ManualClock) -> None:
    core.explanations = {"cmpl-a": explanation("cmpl-a"), "a": explanation("a")}
    async with client_of(core, clock) as client:
        assert (await client.get("/why/cmpl-a")).json()["request_id"] == "cmpl-a"


async def test_why_of_an_unknown_request_is_a_404_and_needs_a_key_where_there_are_keys(
    core: Scripted, clock: ManualClock
) -> None:
    async with client_of(core, clock, api_keys=("k",)) as client:
        core.explanations["a"] = explanation("a")
        assert (await client.get("/why/a")).status_code == 401
        key = {"Authorization": "Bearer k"}
        assert (await client.get("/why/a", headers=key)).status_code == 200
        missing = await client.get("/why/b", headers=key)
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")


async def test_the_list_of_requests_begins_with_those_that_run_and_holds_no_more_than_was_asked_for(
    core: Scripted, clock: ManualClock
) -> None:
    for number in range(6):
        core.explanations[f"e{number}"] = explanation(f"e{number}")
        core.explanations[f"r{number}"] = replace(explanation(f"r{number}"), outcome="decode")
    async with client_of(core, clock) as client:
        found = (await client.get("/requests?limit=4")).json()["requests"]
        assert [(one["outline"]["request_id"], one["seconds_ago"]) for one in found] == [
            ("r0", None),
            ("r1", None),
            ("e0", 3.0),
            ("e1", 3.0),
        ]
        assert (found[0]["reasons"], found[0]["outline"]["whys"]) == (["pair"], [])
        for limit in ("0", "201", "x", "-1", "٣"):
            refused = await client.get("/requests", params={"limit": limit})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limit")


async def test_the_list_of_requests_needs_a_key_where_there_are_keys_and_shows_a_tenant_its_own(
    core: Scripted, clock: ManualClock
) -> None:
    core.explanations = {"a": replace(explanation("a"), tenant="acme"), "b": explanation("b")}
    async with client_of(core, clock, api_keys=KEYS, tenancy=TENANCY) as client:
        assert (await client.get("/requests")).status_code == 401
        for key, names in (("acme-1", ["a"]), ("beta-1", []), ("operator", ["a", "b"])):
            found = (await client.get("/requests", headers={"Authorization": f"Bearer {key}"})).json()["requests"]
            assert [one["outline"]["request_id"] for one in found] == names


CHAT_CLASS = Targets(1.0, 0.05)
TENANCY = Tenancy(
    {"default": Tenant(), "acme": Tenant("acme", cache_domain="acme", max_priority=3), "beta": Tenant("beta")},
    {"chat": CHAT_CLASS, "batch": Targets(60.0)},
)
KEYS = {"default": ("operator",), "acme": ("acme-1", "acme-2"), "beta": ("beta-1",)}
ACME = {"Authorization": "Bearer acme-2"}


async def test_a_request_is_its_keys_tenants_with_its_class_time_and_priority(
    core: Scripted, clock: ManualClock
) -> None:
    async with client_of(core, clock, api_keys=KEYS, tenancy=TENANCY) as client:
        headers = {**ACME, "X-Headrace-Timeout": "2.5", "X-Headrace-Class": "batch"}
        body = {**COMPLETION, "service_class": "chat", "priority": 3}
        assert (await client.post("/v1/completions", json=body, headers=headers)).status_code == 200
        assert (await client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200
        two = {**COMPLETION, "prompt": ["a", "b"]}
        assert (await client.post("/v1/completions", json=two, headers=headers)).status_code == 200
        assert (await client.post("/v1/completions", json={**body, "priority": 4}, headers=headers)).status_code == 400
    first, second, *both = core.jobs
    assert (first.tenant, first.targets, first.priority, first.seconds_left) == ("acme", CHAT_CLASS, 3, 2.5)
    assert first.cache_salt == "\0acme\0"
    assert (second.tenant, second.service_class, second.seconds_left) == ("acme", "batch", 2.5)
    assert [(job.tenant, job.service_class, job.seconds_left) for job in both] == [("acme", "batch", 2.5)] * 2


@pytest.mark.parametrize(
    ("header", "value"), [("X-Headrace-Timeout", "-1"), ("X-Headrace-Timeout", "soon"), ("X-Headrace-Class", "fast")]
)
async def test_a_header_that_means_nothing_is_a_400_that_names_it(
    core: Scripted, clock: ManualClock, header: str, value: str
) -> None:
    async with client_of(core, clock, tenancy=TENANCY) as client:
        response = await client.post("/v1/completions", json=COMPLETION, headers={header: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] in ("x-headrace-timeout", "service_class")
    assert value in response.json()["error"]["message"]
    assert not core.jobs


async def test_a_quota_that_is_exceeded_is_a_429_with_a_time(client: httpx.AsyncClient, core: Scripted) -> None:
    core.error = QuotaExceeded(
        "the tenant's quota does not hold this", retry_after_seconds=6.2, quota="tokens", limit=9
    )
    response = await client.post("/v1/completions", json=COMPLETION)
    assert (response.status_code, response.headers["retry-after"]) == (429, "7")
    assert response.json()["error"]["code"] == "rate_limit_exceeded"


async def test_why_tells_a_tenant_of_its_own_requests_and_the_operator_of_all(
    core: Scripted, clock: ManualClock
) -> None:
    core.explanations["a"] = replace(explanation("a"), tenant="acme")
    async with client_of(core, clock, api_keys=KEYS, tenancy=TENANCY) as client:
        asked = {
            key: await client.get("/why/a", headers={"Authorization": f"Bearer {key}"})
            for key in ("acme-1", "beta-1", "operator")
        }
    assert {key: response.status_code for key, response in asked.items()} == {
        "acme-1": 200,
        "beta-1": 404,
        "operator": 200,
    }
