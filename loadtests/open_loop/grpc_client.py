"""The router's gRPC edge, through the public client."""

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial

from headrace.client import AsyncClient
from headrace.errors import InternalError, Unavailable
from headrace.tls import ClientTls
from loadtests.open_loop.answers import Answer, Ask
from loadtests.open_loop.client import Call, Served, Unreachable, chosen


class GrpcClient:
    def __init__(self, client: AsyncClient, address: str, model: str | None) -> None:
        self._client = client
        self._model = model
        self._address = address

    async def served(self) -> Served:
        try:
            models = await self._client.models()
        except Unavailable as error:
            raise self._told(error) from error
        return chosen([Served(model.id, model.max_context_tokens) for model in models], self._model)

    def prepare(self, ask: Ask) -> Call:
        return partial(self._stream, ask)

    async def _stream(self, ask: Ask, answer: Answer) -> None:
        parts = self._client.generate(ask.prompt, max_tokens=ask.max_tokens, ignore_eos=True, temperature=0.0)
        try:
            async with aclosing(parts):
                async for part in parts:
                    if part.token_ids:
                        answer.hear(len(part.token_ids))
                    if part.usage is not None:
                        usage = part.usage
                        answer.count(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
                        return
        except Unavailable as error:
            raise self._told(error) from error
        raise InternalError(f"the answer ended without its usage, after {answer.num_tokens} tokens")

    def _told(self, error: Unavailable) -> Unavailable:
        """A router names the kind; the bare class is what the channel met."""
        if type(error) is not Unavailable:
            return error
        return Unreachable(f"no router answers at {self._address}: {error.message}")


@asynccontextmanager
async def grpc_client(
    address: str, *, model: str | None = None, api_key: str | None = None, tls: ClientTls | None = None
) -> AsyncIterator[GrpcClient]:
    async with AsyncClient(address, model=model, api_key=api_key, tls=tls) as client:
        yield GrpcClient(client, address, model)
