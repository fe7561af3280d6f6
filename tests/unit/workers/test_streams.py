"""What waits for a router leaves in an order in which nothing is lost."""

from headrace.v1 import worker_pb2
from headrace.values import FinishReason, RequestKey, SequenceOutput
from workers.streams import RouterStream

KEY = RequestKey("r:1")


def token(number: int, finish: FinishReason | None = None) -> tuple[int, SequenceOutput]:
    return 1, SequenceOutput(KEY, 0, (number,), number, finish=finish)


def said(message: worker_pb2.WorkerMessage) -> list[int] | str:
    if not message.HasField("outputs"):
        return str(message.WhichOneof("kind"))
    step = message.outputs
    return [*step.token_ids, *(id for output in step.outputs for id in output.token_ids)]


async def test_whoever_reads_slowly_gets_the_last_tokens_before_the_leave_behind_them() -> None:
    """They came while the ones before were being sent: the leave was sent first, and the router took the rest for lost."""
    stream = RouterStream("router")
    stream.send_outputs([token(1)])
    messages = stream.messages()
    heard = [said(await anext(messages))]
    stream.send(worker_pb2.WorkerMessage(load=worker_pb2.LoadReport()))
    stream.send_outputs([token(2), token(3, FinishReason.LENGTH)])
    stream.send(worker_pb2.WorkerMessage(leaving=worker_pb2.Leaving()))
    stream.end()
    heard += [said(message) async for message in messages]
    assert [one for one in heard if one != "load"] == [[1], [2], [3], "leaving"]


async def test_tokens_that_never_pause_keep_nothing_else_back() -> None:
    """A router whose pings nobody answers takes the worker for silent."""
    stream = RouterStream("router")
    stream.send_outputs([token(1)])
    messages = stream.messages()
    stream.send(worker_pb2.WorkerMessage(pong=worker_pb2.Pong(nonce=7)))
    heard = []
    for number in range(2, 5):
        heard.append(said(await anext(messages)))
        stream.send_outputs([token(number)])
    assert heard == [[1], "pong", [2, 3]]
