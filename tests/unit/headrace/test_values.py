import math
from dataclasses import replace
from typing import Any

import pytest

from headrace.errors import InvalidRequest
from headrace.values import (
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    BlockCounts,
    Compatibility,
    ParallelLayout,
    Request,
    RequestKey,
    Role,
    SamplingParams,
)

SAMPLING = SamplingParams(max_tokens=8)


@pytest.mark.parametrize(
    ("field", "good"),
    [
        ("max_tokens", [1, 2**31 - 1]),
        ("temperature", [0.0, 100.0]),
        ("top_p", [1e-9, 1.0]),
        ("top_k", [0, 2**31 - 1]),
        ("min_p", [0.0, 1.0]),
        ("presence_penalty", [-2.0, 2.0]),
        ("frequency_penalty", [-2.0, 2.0]),
        ("repetition_penalty", [1e-9, 100.0]),
        ("seed", [0, 2**64 - 1]),
        ("min_tokens", [0, 8]),
        ("num_logprobs", [0, 20, None]),
        ("stop_token_ids", [(), (0, 31999)]),
        ("logit_bias", [(), ((3, -100.0), (4, 100.0))]),
    ],
)
def test_the_ends_of_every_range_are_inside(field: str, good: list[Any]) -> None:
    for value in good:
        assert getattr(replace(SAMPLING, **{field: value}), field) == value


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("max_tokens", [0, -1, 2**31, 1.0, True]),
        ("temperature", [-0.1, 100.1, math.nan, math.inf]),
        ("top_p", [0.0, 1.01, math.nan, -1.0]),
        ("top_k", [-1, 0.01, 2**31]),
        ("min_p", [-0.1, 1.1, math.nan]),
        ("presence_penalty", [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2.1, 2.1, math.inf]),
        ("repetition_penalty", [0.0, 101.0, math.nan]),
        ("seed", [-1, 2**64, 0.5]),
        ("min_tokens", [-1, 9]),
    ],
)
def test_case_48_what_is_out_of_range_names_field_value_and_range(field: str, bad: list[Any]) -> None:
    for value in bad:
        with pytest.raises(InvalidRequest) as caught:
            replace(SAMPLING, **{field: value})
        assert caught.value.field == field
        assert repr(value) in caught.value.message
        assert caught.value.numbers["allowed"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_logprobs": 21}, "logprobs"),
        ({"num_logprobs": -1}, "logprobs"),
        ({"logit_bias": ((-1, 0.0),)}, "logit_bias"),
        ({"logit_bias": ((5, 100.5),)}, "logit_bias[5]"),
        ({"logit_bias": ((5, math.nan),)}, "logit_bias[5]"),
        ({"logit_bias": tuple((at, 0.0) for at in range(MAX_LOGIT_BIAS + 1))}, "logit_bias"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"stop_token_ids": tuple(range(MAX_STOP_TOKEN_IDS + 1))}, "stop_token_ids"),
    ],
)
def test_lists_are_checked_entry_by_entry_and_in_length(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        replace(SAMPLING, **changes)
    assert caught.value.field == field


def test_token_ids_beyond_the_vocabulary_are_named() -> None:
    replace(SAMPLING, logit_bias=((9, 1.0),), stop_token_ids=(9,)).check_vocabulary(10)
    with pytest.raises(InvalidRequest, match="from 0 to 8, got 9"):
        replace(SAMPLING, logit_bias=((9, 1.0),)).check_vocabulary(9)
    with pytest.raises(InvalidRequest) as caught:
        replace(SAMPLING, stop_token_ids=(9,)).check_vocabulary(9)
    assert caught.value.field == "stop_token_ids"


def test_temperature_zero_is_greedy() -> None:
    assert replace(SAMPLING, temperature=0.0).greedy
    assert not SAMPLING.greedy


def test_a_request_has_a_prompt_and_at_least_one_sample() -> None:
    key = RequestKey("r")
    assert Request(key, (1, 2), SAMPLING).num_prompt_tokens == 2
    with pytest.raises(InvalidRequest) as caught:
        Request(key, (), SAMPLING)
    assert caught.value.field == "prompt"
    for n in (0, 129):
        with pytest.raises(InvalidRequest) as caught:
            Request(key, (1,), SAMPLING, n=n)
        assert caught.value.field == "n"


def test_attempts_count_up() -> None:
    assert RequestKey("r").next_attempt() == RequestKey("r", 2)


def test_roles_say_what_they_do() -> None:
    assert [(role.prefills, role.decodes) for role in (Role.PREFILL, Role.DECODE, Role.UNIFIED)] == [
        (True, False),
        (False, True),
        (True, True),
    ]


def test_a_layout_is_at_least_one_by_one() -> None:
    assert ParallelLayout(2, 3).world_size == 6
    assert str(ParallelLayout(2, 3)) == "tp2·pp3"
    for bad in ({"tp": 0}, {"pp": -1}):
        with pytest.raises(ValueError, match="at least 1"):
            ParallelLayout(**bad)


COMPATIBILITY = Compatibility("m", "r1", "t", "c", "float32", "float32")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "x"),
        ("revision", "x"),
        ("tokenizer", "x"),
        ("chat_template", "x"),
        ("dtype", "x"),
        ("kv_dtype", "x"),
        ("kv_scale", "x"),
        ("block_size", 64),
        ("slab_version", 9),
        ("hash_version", 9),
        ("protocol_version", 9),
    ],
)
def test_case_61_each_field_that_differs_is_named(field: str, value: Any) -> None:
    assert COMPATIBILITY.first_difference(replace(COMPATIBILITY, **{field: value})) == field


def test_equal_workers_have_no_difference() -> None:
    assert COMPATIBILITY.first_difference(replace(COMPATIBILITY)) is None


def test_the_kv_format_tells_apart_what_makes_kv_differ() -> None:
    others = [
        replace(COMPATIBILITY, **change) for change in ({"kv_dtype": "x"}, {"kv_scale": "x"}, {"slab_version": 9})
    ]
    assert len({COMPATIBILITY.kv_format, *(other.kv_format for other in others)}) == 4


def test_block_counts_sum_up() -> None:
    assert BlockCounts(1, 2, 3, 4, 5, 6).total == 21
