import asyncio
import json
import logging
import sys

from headrace.logs import JsonFormatter, serving
from headrace.tracing import TraceContext


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    log = logging.getLogger("part.of.it")
    return log.makeRecord(log.name, logging.WARNING, __file__, 1, message, arguments, None, extra=extra)


def line(said: logging.LogRecord) -> dict[str, object]:
    return dict(json.loads(JsonFormatter().format(said)))


def test_a_record_is_one_object_with_what_was_said() -> None:
    said = line(record("%d of %s", 3, "them"))
    assert said.pop("time")
    assert said == {"level": "WARNING", "logger": "part.of.it", "message": "3 of them"}


def test_it_names_the_request_of_its_task_or_its_own() -> None:
    async def task(name: str) -> dict[str, object]:
        serving(name, TraceContext(10, 1, sampled=True))
        await asyncio.sleep(0)
        return line(record("a"))

    async def both() -> list[dict[str, object]]:
        return await asyncio.gather(task("one"), task("two"))

    one, two = asyncio.run(both())
    assert (one["request_id"], two["request_id"]) == ("one", "two")
    assert one["trace_id"] == f"{10:032x}"
    assert "request_id" not in line(record("a"))
    own = line(record("a", request_id="mine", fields={"stages": {"edge": 0.5}}))
    assert (own["request_id"], own["stages"]) == ("mine", {"edge": 0.5})


def test_an_exception_is_told_whole_in_one_line() -> None:
    said = record("failed")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        said.exc_info = sys.exc_info()
    text = JsonFormatter().format(said)
    assert "\n" not in text
    assert "ValueError: two\nlines" in json.loads(text)["exception"]
