"""Traces of both published forms, as rows of one form; prompts that share what the trace says and nothing else."""

import pathlib

import pytest

from headrace.traces import Prompts, TraceError, TraceRow, read, spread, within

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)
TIMED = '{"timestamp": %s, "input_length": %s, "output_length": 1, "hash_ids": []}\n'
MOONCAKE = """{"timestamp": 0, "input_length": 700, "output_length": 6, "hash_ids": [1, 2]}

{"timestamp": 3000, "input_length": 900, "output_length": 4, "hash_ids": [1, 3]}
"""


def written(tmp_path: pathlib.Path, name: str, text: str) -> pathlib.Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_azure_rows_count_seconds_from_the_first(tmp_path: pathlib.Path) -> None:
    first, second = read(written(tmp_path, "a.csv", AZURE))
    assert first == TraceRow(0, 0.0, 374, 44)
    assert (second.input_tokens, second.output_tokens, second.prefix_ids) == (396, 109, ())
    assert second.seconds == pytest.approx(4.314579)


def test_mooncake_rows_keep_their_prefix_ids(tmp_path: pathlib.Path) -> None:
    assert read(written(tmp_path, "m.jsonl", MOONCAKE)) == [
        TraceRow(0, 0.0, 700, 6, (1, 2)),
        TraceRow(1, 3.0, 900, 4, (1, 3)),
    ]


def test_the_sample_beside_the_examples_can_be_read() -> None:
    rows = read(pathlib.Path(__file__).parents[3] / "examples" / "azure_sample.csv")
    assert len(rows) == 400
    assert rows == sorted(rows, key=lambda row: row.seconds)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.csv",
            "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3\n",
            "a.csv, line 2: lacks GeneratedTokens; a request",
        ),
        ("a.csv", AZURE + "yesterday,1,1\n", "a.csv, line 4: Invalid isoformat string: 'yesterday'"),
        (
            "a.csv",
            AZURE + "2023-11-16 18:16:00\n",
            "a.csv, line 4: is no such record, or lacks a value; .*ContextTokens",
        ),
        ("a.csv", AZURE + "2023-11-16 18:16:00,0,1\n", "a.csv, line 4: lengths must be at least 1, got 0 and 1"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
        ("m.jsonl", "{}\n", "m.jsonl, line 1: lacks timestamp; a request has timestamp, input_length"),
        ("m.jsonl", "[1]\n", "m.jsonl, line 1: is no such record"),
        ("m.jsonl", MOONCAKE + "not json\n", r"m.jsonl, line 4: is not JSON \(Expecting value, column 1\)"),
        ("m.jsonl", TIMED % ("NaN", 1), "m.jsonl, line 1: a timestamp must be a finite"),  # it was read for ever
        ("m.jsonl", TIMED % ("1e400", 1), "m.jsonl, line 1: a timestamp must be a finite"),
        ("m.jsonl", TIMED % (1, "1e400"), "m.jsonl, line 1: cannot convert float infinity"),
        ("m.parquet", "", r"ends in \.csv or \.jsonl"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: pathlib.Path, name: str, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read(written(tmp_path, name, text))


def test_a_file_that_is_not_there_or_no_text_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(TraceError, match=r"gone\.csv cannot be read: No such file"):
        read(tmp_path / "gone.csv")
    (tmp_path / "m.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(TraceError, match=r"m\.jsonl is no text in UTF-8"):
        read(tmp_path / "m.jsonl")
    (tmp_path / "a.csv").write_text("TIMESTAMP\n" + "x" * 200_000)
    with pytest.raises(TraceError, match=r"a\.csv is no CSV: field larger than field limit"):
        read(tmp_path / "a.csv")


def test_rows_of_one_stamp_are_spread_up_to_the_next() -> None:
    rows = [TraceRow(number, seconds, 1, 1) for number, seconds in enumerate((0.0, 0.0, 0.0, 3.0, 5.0, 5.0))]
    assert [row.seconds for row in spread(rows)] == [0.0, 1.0, 2.0, 3.0, 5.0, 5.0]


def test_rows_beyond_the_context_are_removed_and_counted() -> None:
    rows = [TraceRow(0, 0.0, 90, 10), TraceRow(1, 0.0, 90, 11)]
    assert within(rows, 100) == (rows[:1], 1)


def test_equal_prefix_ids_are_equal_tokens_and_nothing_else_is() -> None:
    prompts = Prompts(vocab_size=50, tokens_per_id=16)
    one = prompts.of(TraceRow(0, 0.0, 40, 1, (1, 2, 3)))
    two = prompts.of(TraceRow(1, 0.0, 40, 1, (1, 2, 4)))
    assert len(one) == len(two) == 40
    assert one[:32] == two[:32]
    assert one[32:] != two[32:]
    assert one == Prompts(vocab_size=50, tokens_per_id=16).of(TraceRow(7, 9.0, 40, 1, (1, 2, 3)))
    assert set(one) <= set(range(50))


def test_rows_without_prefix_ids_share_no_block() -> None:
    prompts = Prompts(vocab_size=32_000)
    firsts = {prompts.of(TraceRow(number, 0.0, 70_000 if number == 5 else 64, 1))[:16] for number in range(500)}
    assert len(firsts) == 500
