import random
import subprocess
import sys

import pytest

from headrace.clock import ManualClock
from headrace.config_file import parse as parse_config
from headrace.errors import ConfigError
from headrace.otlp import open_spans
from headrace.tracing import Sampler, TraceContext, parse

TRACE, SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
HEADER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_traceparent_is_read_and_written_as_the_standard_has_it() -> None:
    parent = parse(HEADER)
    assert parent == TraceContext(TRACE, SPAN, sampled=True)
    assert parent.traceparent == HEADER
    assert parent.trace == "0af7651916cd43dd8448eb211c80319c"
    assert parent.child(7) == TraceContext(TRACE, 7, True, SPAN)


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        (HEADER[:-2] + "00", False),
        (HEADER[:-2] + "02", False),
        (HEADER[:-2] + "ff", True),
        ("cc" + HEADER[2:] + "-what-is-yet-to-come", True),
    ],
)
def test_flags_and_later_versions(text: str, sampled: bool) -> None:
    parent = parse(text)
    assert parent is not None
    assert parent.sampled is sampled


@pytest.mark.parametrize(
    "text",
    [
        "",
        HEADER.upper(),
        HEADER[:-1],
        HEADER + "-x",
        "ff" + HEADER[2:],
        "00-" + "0" * 32 + HEADER[35:],
        HEADER[:36] + "0" * 16 + "-01",
        HEADER + "-" + "a" * 300,
    ],
)
def test_what_is_no_traceparent_is_none(text: str) -> None:
    assert parse(text) is None


def test_a_caller_says_of_his_own_and_the_fraction_of_the_rest() -> None:
    never, always = Sampler(0.0, random.Random(1).getrandbits), Sampler(1.0, random.Random(1).getrandbits)
    assert never.enter(HEADER).sampled
    assert never.enter(HEADER).parent_id == SPAN
    assert not always.enter(HEADER[:-2] + "00").sampled
    assert not never.enter("nonsense").sampled
    assert always.enter("").sampled
    some = Sampler(0.1, random.Random(1).getrandbits)
    assert 60 < sum(some.enter("").sampled for _ in range(1000)) < 140
    first = always.enter("")
    second = always.another(first)
    assert (first.trace_id, first.parent_id) == (second.trace_id, second.parent_id)
    assert first.span_id != second.span_id


def test_an_id_is_never_zero() -> None:
    drawn = iter([0, 5, 0, 6])
    context = Sampler(1.0, lambda bits: next(drawn)).enter("")
    assert (context.trace_id, context.span_id) == (5, 6)


def test_off_it_is_nothing_and_no_exporter_is_even_imported() -> None:
    assert open_spans(None, ManualClock(), "s", "i") is None
    code = "import router.__main__, workers.spans, sys; sys.exit('opentelemetry.exporter' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_collector_that_never_answers_keeps_no_process_from_ending() -> None:
    code = """
import asyncio, socket
from headrace import otlp
from headrace.clock import SystemClock
from headrace.tracing import Span, TraceContext

async def main():
    otlp.CLOSE_SECONDS, otlp.EXPORT_SECONDS = 0.1, 600
    with socket.create_server(("127.0.0.1", 0)) as silent:
        spans = otlp.open_spans(f"http://127.0.0.1:{silent.getsockname()[1]}", SystemClock(), "s", "i")
        spans.export([Span("a", TraceContext(1, 2, True), 0.0, 1.0)])
        await spans.close()

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


def test_an_endpoint_that_is_none_is_refused_by_its_name() -> None:
    allowed = r"tracing\.otlp_endpoint: must be grpc://HOST:PORT.*got 'collector:4317'"
    with pytest.raises(ConfigError, match=allowed):
        open_spans("collector:4317", ManualClock(), "s", "i")
    with pytest.raises(ConfigError, match=r"tracing\.otlp_endpoint: must .*got 'collector:4317'"):
        parse_config("model: m\npools: {a: {role: unified}}\ntracing: {otlp_endpoint: 'collector:4317'}")


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match=r"tracing\.otlp_endpoint.*headrace\[tracing\]"):
        open_spans("grpc://nowhere:4317", ManualClock(), "s", "i")
