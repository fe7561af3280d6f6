"""Every bad value is an InvalidRequest that names field, value and range; what is good becomes a Job."""

import math
import re
from typing import Any

import pytest

from headrace.config import LimitsConfig
from headrace.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound
from router.decisions.tenants import NO_CLASS, NO_TARGETS, Targets, Tenancy, Tenant
from router.edge.validate import Asked, Envelope, JobMaker, check_client_id, check_seconds, check_text
from router.text.served import Models, ServedModel
from router.text.vocabulary import Text

PROMPT = (5, 6, 7)


@pytest.fixture
def model(tiny: Text) -> ServedModel:
    return ServedModel("tiny", "r1", max_context_tokens=32, vocab_size=500, text=tiny)


def make(model: ServedModel, prompt: Any = PROMPT, **asked: Any) -> Any:
    jobs = JobMaker(LimitsConfig(default_max_tokens=16), draw_seed=lambda: 77)
    return jobs.make(model, prompt, Asked(**asked), Envelope(request_id="r"))


def refused(model: ServedModel, prompt: Any = PROMPT, **asked: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        make(model, prompt, **asked)
    return caught.value.message


def test_silence_takes_the_defaults_and_a_drawn_seed(model: ServedModel) -> None:
    job = make(model)
    assert (job.sampling.temperature, job.sampling.top_p, job.n, job.sampling.seed) == (1.0, 1.0, 1, 77)


@pytest.mark.parametrize("reach", [8, 64])
def test_the_context_is_what_workers_serve_not_what_the_checkpoint_names(model: ServedModel, reach: int) -> None:
    """Windowed attention serves less, a stretched rotation more: max_tokens that nobody gave must fit either."""
    jobs = JobMaker(LimitsConfig(default_max_tokens=100), draw_seed=lambda: 77, reach=lambda: reach)
    job = jobs.make(model, PROMPT, Asked(), Envelope(request_id="r"))
    assert job.sampling.max_tokens == reach - len(PROMPT)
    jobs.make(model, PROMPT, Asked(max_tokens=reach - len(PROMPT)), Envelope(request_id="r"))
    with pytest.raises(ContextLengthExceeded, match=f"maximum context length is {reach} tokens"):
        jobs.make(model, PROMPT, Asked(max_tokens=reach - len(PROMPT) + 1), Envelope(request_id="r"))
    with pytest.raises(ContextLengthExceeded, match=f"maximum context length is {reach} tokens"):
        jobs.make(model, (5,) * reach, Asked(), Envelope(request_id="r"))


def test_everything_that_is_asked_arrives(model: ServedModel) -> None:
    job = make(
        model,
        max_tokens=5,
        min_tokens=2,
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.5,
        logit_bias={"7": -100, 8: 1.5},
        seed=-1,
        ignore_eos=True,
        stop=["a", "b", "a"],
        stop_token_ids=[3],
        logprobs=4,
        n=2,
        best_of=2,
        priority=-5,
        cache_salt="s",
    )
    sampling = job.sampling
    assert sampling.max_tokens == 5
    assert sampling.greedy
    assert sampling.logit_bias == ((7, -100), (8, 1.5))
    assert sampling.seed == 2**64 - 1
    assert (sampling.stop_token_ids, sampling.num_logprobs, sampling.ignore_eos) == ((3,), 4, True)
    assert (job.stop, job.n, job.priority, job.cache_salt) == (("a", "b"), 2, -5, "s")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0"),
        ({"max_tokens": -1}, "max_tokens must be an integer of at least 1, got -1"),
        ({"max_tokens": 1.0}, "max_tokens must be an integer of at least 1, got 1.0"),
        ({"max_tokens": True}, "max_tokens must be an integer of at least 1, got True"),
        ({"temperature": math.nan}, "temperature must be from 0.0 to 100.0, got nan"),
        ({"temperature": math.inf}, "temperature must be a finite number, got inf"),
        ({"temperature": 1e9}, "temperature must be from 0.0 to 100.0, got 1000000000.0"),
        ({"temperature": 10**400}, "temperature must be a finite number, got 1"),
        ({"temperature": "hot"}, "temperature must be a finite number, got 'hot'"),
        ({"temperature": False}, "temperature must be a finite number, got False"),
        ({"top_k": 0.01}, "top_k must be an integer from 0 to"),
        ({"top_p": 0}, "top_p must be above 0.0 and at most 1.0, got 0"),
        ({"min_tokens": 17}, "min_tokens must be from 0 to 16, got 17"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0.0"),
        ({"presence_penalty": 2.5}, "presence_penalty must be from -2.0 to 2.0, got 2.5"),
        ({"seed": 2**64}, "seed must be an integer from"),
        ({"seed": 1.5}, "seed must be an integer from"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false, got 1"),
        ({"logprobs": 21}, "logprobs must be from 0 to 20, got 21"),
        ({"logprobs": True}, "logprobs must be an integer from 0 to 20, got True"),
        ({"n": 0}, "n must be an integer from 1 to 128, got 0"),
        ({"n": 129}, "n must be an integer from 1 to 128, got 129"),
        ({"n": 2, "best_of": 3}, r"best_of must be absent or equal to n \(2\), got 3"),
        ({"priority": 1000}, "priority must be an integer from -100 to 100, got 1000"),
        ({"cache_salt": 5}, "cache_salt must be a string of at most 256 characters, got 5"),
        ({"cache_salt": "x" * 257}, "cache_salt must be a string of at most 256 characters"),
        ({"logit_bias": {"AI": -100}}, "logit_bias must be an object whose keys are token ids, got 'AI'"),
        ({"logit_bias": {"500": 1}}, "logit_bias must be token ids from 0 to 499, got 500"),
        ({"logit_bias": {"-1": 1}}, "logit_bias must be an object whose keys are token ids, got '-1'"),
        ({"logit_bias": {"5": 101}}, r"logit_bias\[5\] must be from -100.0 to 100.0, got 101"),
        ({"logit_bias": {"5": math.nan}}, r"logit_bias\[5\] must be from -100.0 to 100.0, got nan"),
        ({"logit_bias": {"5": "x"}}, r"logit_bias\[5\] must be a finite number, got 'x'"),
        ({"logit_bias": [5, 1]}, "logit_bias must be an object of token ids and numbers"),
        (
            {"logit_bias": {str(i): 0 for i in range(1025)}},
            "logit_bias must be at most 1024 entries, got 1025 entries",
        ),
        ({"stop": [""]}, r"stop\[0\] must be a string of 1 to 256 characters, got ''"),
        ({"stop": ""}, r"stop\[0\] must be a string of 1 to 256 characters, got ''"),
        ({"stop": ["a", 5]}, r"stop\[1\] must be a string of 1 to 256 characters, got 5"),
        ({"stop": 5}, "stop must be a string or a list of strings, got 5"),
        ({"stop": {"a": 1}}, "stop must be a string or a list of strings"),
        ({"stop": ["x"] * 100_000}, "stop must be at most 16 strings, got 100000 strings"),
        ({"stop": "\ud800"}, r"stop\[0\] must be Unicode text without lone surrogates"),
        ({"stop_token_ids": [500]}, "stop_token_ids must be token ids from 0 to 499, got 500"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be token ids from 0"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of token ids, got 5"),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids must be at most 64 ids"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_case_48_a_bad_parameter_names_field_value_and_range(
    model: ServedModel, asked: dict[str, Any], message: str
) -> None:
    assert re.search(message, refused(model, **asked))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "prompt must be at least 1 token, got no tokens"),
        ((1, 500), "prompt[1] must be token ids from 0 to 499, got 500"),
        ((999_999,), "prompt[0] must be token ids from 0 to 499, got 999999"),
        ((-1,), "prompt[0] must be token ids from 0 to 499, got -1"),
        ((1.0,), "prompt[0] must be token ids from 0 to 499, got 1.0"),
        ((True,), "prompt[0] must be token ids from 0 to 499, got True"),
    ],
)
def test_case_48_a_prompt_holds_tokens_of_the_vocabulary(model: ServedModel, prompt: Any, message: str) -> None:
    assert refused(model, prompt) == message


def test_case_47_max_tokens_absent_is_the_default_or_the_room_there_is(model: ServedModel) -> None:
    assert make(model).sampling.max_tokens == 16
    assert make(model, (1,) * 30).sampling.max_tokens == 2


def test_case_28_prompt_and_answer_may_fill_the_context_and_no_more(model: ServedModel) -> None:
    assert make(model, (1,) * 31, max_tokens=1).sampling.max_tokens == 1
    assert make(model, (1,) * 2, max_tokens=30).sampling.max_tokens == 30
    with pytest.raises(ContextLengthExceeded) as caught:
        make(model, (1,) * 2, max_tokens=31)
    assert caught.value.numbers == {"limit": "32", "actual": "33", "field": "max_tokens"}
    assert "32 tokens" in caught.value.message


@pytest.mark.parametrize("num_tokens", [32, 33])
def test_case_28_a_prompt_that_leaves_no_room_is_refused_with_limit_and_actual(
    model: ServedModel, num_tokens: int
) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        make(model, (1,) * num_tokens)
    assert caught.value.numbers == {"limit": "32", "actual": str(num_tokens), "field": "prompt"}


def test_case_47_a_huge_max_tokens_exceeds_the_context(model: ServedModel) -> None:
    with pytest.raises(ContextLengthExceeded, match="1000000003 tokens"):
        make(model, max_tokens=10**9)


def test_an_unknown_model_is_not_found_and_never_a_label(model: ServedModel) -> None:
    models = Models({"tiny": model})
    with pytest.raises(ModelNotFound, match="model must be one of tiny, got 'other'"):
        models.get("other")
    assert (models.label("other"), models.label("tiny")) == ("unknown", "tiny")
    with pytest.raises(ModelNotFound) as caught:
        models.get("x" * 10_000)
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("client_id", ["x" * 129, "a b", "é", "a\nb"])
def test_a_clients_id_is_short_and_printable(client_id: str) -> None:
    with pytest.raises(InvalidRequest, match="request_id must be at most 128 printable"):
        check_client_id(client_id)


def test_text_with_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="prompt must be Unicode text without lone surrogates"):
        check_text("prompt", "a\udc00")


CHAT, BATCH = Targets(1.0, 0.05), Targets(60.0)
TENANCY = Tenancy(classes={"chat": CHAT, "batch": BATCH}, default_class="batch")


def of_tenant(model: ServedModel, tenant: Tenant, header: str | None = None, **asked: Any) -> Any:
    jobs = JobMaker(LimitsConfig(default_max_tokens=16), draw_seed=lambda: 77, tenancy=TENANCY)
    envelope = Envelope(request_id="r", tenant=tenant, service_class=header)
    return jobs.make(model, PROMPT, Asked(**asked), envelope)


def test_the_class_is_the_requests_word_then_a_headers_then_the_tenants_then_the_default(model: ServedModel) -> None:
    plain, chatty = Tenant("plain"), Tenant("chatty", service_class="chat")
    assert (of_tenant(model, plain).service_class, of_tenant(model, plain).targets) == ("batch", BATCH)
    assert of_tenant(model, chatty).targets == CHAT
    assert of_tenant(model, chatty, header="batch").targets == BATCH
    assert of_tenant(model, chatty, header="batch", service_class="chat").targets == CHAT
    assert (make(model).service_class, make(model).targets) == (NO_CLASS, NO_TARGETS)


@pytest.mark.parametrize(
    ("tenant", "asked", "expected"),
    [
        (Tenant("a"), "fast", "service_class must be one of chat, batch, got 'fast'"),
        (Tenant("a"), 3, "service_class must be a string, got 3"),
        (Tenant("a", service_classes=("batch",)), "chat", "service_class must be one of batch, got 'chat'"),
        (Tenant("a", service_classes=()), "chat", "service_class must be absent"),
    ],
)
def test_a_class_that_a_tenant_may_not_have_is_named(
    model: ServedModel, tenant: Tenant, asked: Any, expected: str
) -> None:
    with pytest.raises(InvalidRequest, match=expected):
        of_tenant(model, tenant, service_class=asked)


def test_priority_goes_as_high_as_the_tenant_may(model: ServedModel) -> None:
    low = Tenant("low", max_priority=-5)
    assert (of_tenant(model, low).priority, of_tenant(model, low, priority=-7).priority) == (-5, -7)
    with pytest.raises(InvalidRequest, match="priority must be an integer from -100 to -5, got 0"):
        of_tenant(model, low, priority=0)


def test_case_35_no_salt_of_one_tenant_reaches_anothers_cache(model: ServedModel) -> None:
    salts = ["", "acme", "b", "cme"]
    tenants = [Tenant(), Tenant("a", cache_domain="a"), Tenant("acme", cache_domain="acme")]
    seen = {of_tenant(model, tenant, cache_salt=salt).cache_salt for tenant in tenants for salt in salts}
    assert len(seen) == len(salts) * len(tenants)
    assert of_tenant(model, Tenant(), cache_salt="x").cache_salt == "x"
    friends = [Tenant(name, cache_domain="friends") for name in "ab"]
    assert len({of_tenant(model, tenant).cache_salt for tenant in friends}) == 1
    assert "NUL" in refused(model, cache_salt="\0acme\0")


@pytest.mark.parametrize(
    ("asked", "repeatable"), [({}, False), ({"seed": 3}, True), ({"temperature": 0}, True), ({"temperature": 1}, False)]
)
def test_what_may_be_answered_with_the_same_tokens(model: ServedModel, asked: dict[str, Any], repeatable: bool) -> None:
    assert make(model, **asked).repeatable is repeatable


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "", "86401", "1e99"])
def test_a_time_limit_is_a_number_of_seconds(value: str) -> None:
    assert check_seconds("x-headrace-timeout", "2.5") == 2.5
    with pytest.raises(
        InvalidRequest, match="x-headrace-timeout must be a number of seconds above 0 and at most 86400"
    ):
        check_seconds("x-headrace-timeout", value)
