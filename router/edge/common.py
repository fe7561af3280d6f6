"""What both edges do alike: who may ask, a prompt to tokens, a job to its pieces, and what is counted of it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from hashlib import blake2b
from itertools import islice
from types import AsyncGeneratorType
from typing import Any, Protocol, TypeVar

from prometheus_client import Counter

from headrace import metrics
from headrace.clock import Clock
from headrace.errors import Draining, HeadraceError, InternalError, InvalidRequest, RequestCancelled
from headrace.tracing import Sampler, TraceContext
from headrace.values import DEFAULT_TENANT
from router.decisions.tenants import Tenancy, Tenant
from router.edge.messages import check_messages, check_template_kwargs, check_tools
from router.edge.validate import Asked, Envelope, JobMaker, check_client_id, check_text, check_token_ids
from router.explanations import Explanation, Recent
from router.jobs import Job, Piece
from router.keyring import Keyring
from router.text.budget import characters_of
from router.text.served import Models, ServedModel

INLINE_CHARACTERS = 4096
# JSON of this size is parsed and walked in about 3 ms, whatever is in it.
INLINE_BYTES = 32 * 2**10
# Threads share the interpreter: more at once would only take the event loop's turns.
MAX_ASIDE = 2
# A drain waits no longer for clients that read nothing.
UNREAD_SECONDS = 5.0
T = TypeVar("T")

_ANSWERS = Counter(metrics.ANSWERS, "Requests as clients saw them end, refusals included.", ["model", "outcome"])


class Streams(Protocol):
    """What an edge needs of router.shared_answers.SharedAnswers."""

    def stream(self, job: Job) -> AsyncGenerator[Piece]: ...
    def why(self, request_id: str, /) -> Explanation | None: ...
    def recent(self, tenant: str | None, num_running: int) -> Iterator[Recent]: ...


class Relay:
    """A request on its way to its client, who has taken `num_taken` of its `pieces`."""

    __slots__ = ("num_taken", "pieces")

    def __init__(self, pieces: AsyncGenerator[Piece]) -> None:
        self.pieces = pieces
        self.num_taken = 0

    @property
    def waits_for_client(self) -> bool:
        """Whether there is a piece that the client has not taken yet, rather than one to come."""
        return isinstance(self.pieces, AsyncGeneratorType) and not self.pieces.ag_running

    @asynccontextmanager
    async def bounded(self, seconds: float) -> AsyncIterator[None]:
        """RequestCancelled once the client has taken nothing between two looks, so many seconds apart, though there was
        something."""
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def look(stood_at: int | None) -> None:
            nonlocal timer
            stands_at = self.num_taken if self.waits_for_client else None
            if stands_at is not None and stands_at == stood_at:
                patience.reschedule(loop.time())
            else:
                timer = loop.call_later(seconds, look, stands_at)

        timer = loop.call_later(seconds, look, None)
        try:
            async with asyncio.timeout(None) as patience:
                yield
        except TimeoutError as error:
            if not patience.expired():
                raise
            raise RequestCancelled(f"the client read nothing for {seconds:g} s") from error
        finally:
            timer.cancel()


class Edge:
    """One per router. Owns which requests are in flight and whether new ones are taken.

    `unready` says why no request could be served just now, or None. `draw_id` gives a new short id. `sampler` None: nothing
    is traced. `splits`: whether conversations go to several revisions just now.
    """

    def __init__(
        self,
        models: Models,
        jobs: JobMaker,
        requests: Streams,
        clock: Clock,
        *,
        unready: Callable[[], str | None],
        draw_id: Callable[[], str],
        keyring: Keyring,
        tenancy: Tenancy,
        sampler: Sampler | None = None,
        splits: Callable[[], bool] = lambda: False,
    ) -> None:
        self.models = models
        self._jobs = jobs
        self._requests = requests
        self._clock = clock
        self._unready = unready
        self._draw_id = draw_id
        self._keyring = keyring
        self._tenants = tenancy.tenants
        self._sampler = sampler
        self._splits = splits
        self._relays: set[Relay] = set()
        self._draining = False
        self._aside = asyncio.Semaphore(MAX_ASIDE)
        self._idle = asyncio.Event()

    def authorise(self, authorization: str | None) -> Tenant:
        """Who asks: the tenant whose key the header carries. With no keys configured, all may ask. Unauthenticated when
        it is nobody's."""
        return self._tenants[self._keyring.tenant(authorization)]

    def new_id(self, client_id: str = "", field: str = "request_id") -> str:
        """The id of a request: the client's own, from `field`, else a new one. Between processes it has a name of the
        router's."""
        return check_client_id(client_id, field) or self._draw_id()

    def now(self) -> float:
        """The router's clock: when a request is whole, its time begins."""
        return self._clock.now()

    def enter_trace(self, traceparent: str) -> TraceContext | None:
        """The span of a request that comes with such a header; None while nothing is traced."""
        return self._sampler.enter(traceparent) if self._sampler is not None else None

    def another(self, trace: TraceContext | None) -> TraceContext | None:
        """For the second of several prompts in one call."""
        return self._sampler.another(trace) if self._sampler is not None and trace is not None else None

    def max_context_tokens(self, model: ServedModel) -> int:
        return self._jobs.max_context_tokens(model)

    def unready(self) -> str | None:
        """Why this router should get no new requests, or None."""
        return "draining" if self._draining else self._unready()

    def why(self, request_id: str, tenant: Tenant) -> Explanation | None:
        """Why a request ran where it ran, and what became of it, while that is remembered. A tenant hears of its own; the
        default one, which is the operator's, of all."""
        explanation = self._requests.why(request_id)
        if explanation is None or tenant.name in (DEFAULT_TENANT, explanation.tenant):
            return explanation
        return None

    def recent(self, tenant: Tenant, limit: int) -> list[Recent]:
        """`limit` requests: up to half of them such that run, for the longest, then those that ended last. A tenant hears
        of its own, as above."""
        own = None if tenant.name == DEFAULT_TENANT else tenant.name
        return list(islice(self._requests.recent(own, max(limit // 2, 1)), limit))

    async def drain(self) -> None:
        """Takes no new requests from now on; returns when those in flight have ended, but for those whose clients took
        nothing between two looks, UNREAD_SECONDS apart."""
        self._draining = True
        stood_at: dict[Relay, int] = {}
        while any(stood_at.get(relay) != relay.num_taken for relay in self._relays):
            stood_at = {relay: relay.num_taken for relay in self._relays if relay.waits_for_client}
            self._idle.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(UNREAD_SECONDS):
                    await self._idle.wait()

    async def parse(self, parse: Callable[..., T], *raw: Any, size: int) -> T:
        """What `parse` makes of `raw`; long texts are parsed on a thread, so that streams go on meanwhile."""
        return parse(*raw) if size <= INLINE_BYTES else await self._on_thread(parse, *raw)

    async def _on_thread(self, work: Callable[..., T], *args: Any) -> T:
        async with self._aside:
            return await asyncio.to_thread(work, *args)

    async def prompt_job(self, model_name: str, prompt: Any, asked: Asked, envelope: Envelope) -> Job:
        """A job from a prompt as text or token ids."""
        model = self.models.get(model_name)
        token_ids = await self.prompt_tokens(model, prompt)
        return self._jobs.make(model, token_ids, asked, envelope, continues=True)

    async def prompt_tokens(self, model: ServedModel, prompt: Any) -> Sequence[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise InvalidRequest.out_of_range("prompt", prompt, "at least 1 character")
            return await encode(model, check_text("prompt", prompt), add_special_tokens=True)
        if isinstance(prompt, list):
            self._jobs.check_room(model, len(prompt))
            return check_token_ids("prompt", prompt, model.vocab_size)
        raise InvalidRequest.out_of_range("prompt", prompt, "a string or a list of token ids")

    async def chat_job(
        self, model_name: str, messages: Any, tools: Any, template_kwargs: Any, asked: Asked, envelope: Envelope
    ) -> Job:
        """A job from messages, through the model's chat template."""
        model = self.models.get(model_name)
        rendered = await self._render(model, messages, tools, template_kwargs)
        token_ids = await encode(model, check_text("messages", rendered), add_special_tokens=False)
        if self._splits() and not envelope.conversation:
            envelope = replace(envelope, conversation=conversation_of(messages))
        return self._jobs.make(model, token_ids, asked, envelope)

    async def _render(self, model: ServedModel, *given: Any) -> str:
        """A short chat is rendered at once, if its template is quick about it; any other on a thread."""

        def checked() -> tuple[Any, Any, Any]:
            messages, tools, kwargs = given
            return check_messages(messages), check_tools(tools), check_template_kwargs(kwargs)

        if characters_of(given, INLINE_BYTES) <= INLINE_BYTES:
            rendered = model.text.render_briefly(*checked())
            if rendered is not None:
                return rendered
        return await self._on_thread(lambda: model.text.render(*checked()))

    @asynccontextmanager
    async def relay(self, job: Job) -> AsyncIterator["Relay"]:
        """The job's pieces. Leaving early cancels the job."""
        if self._draining:
            raise Draining("this router is shutting down")
        async with aclosing(self._requests.stream(job)) as pieces:
            relay = Relay(pieces)
            self._relays.add(relay)
            try:
                yield relay
            finally:
                self._relays.discard(relay)
                if not self._relays:
                    self._idle.set()

    @contextmanager
    def counted(self, model_name: str, *, refusals_only: bool = False) -> Iterator[None]:
        """Counts how a request ended: ok, cancelled, or the type of its error; what came before its answer counts only
        when it is refused there."""
        outcome: str | None = "cancelled"
        try:
            yield
            outcome = None if refusals_only else "ok"
        except HeadraceError as error:
            outcome = error.type
            raise
        except Exception:
            outcome = InternalError.__name__
            raise
        finally:
            if outcome is not None:
                _ANSWERS.labels(self.models.label(model_name), outcome).inc()


def conversation_of(messages: Any) -> str:
    """What stays the same of a chat as it goes on: all up to its user's first word."""
    said = blake2b(digest_size=16)
    for message in messages:
        said.update(repr(message).encode(errors="replace"))
        if message.get("role") == "user":
            break
    return said.hexdigest()


async def encode(model: ServedModel, text: str, *, add_special_tokens: bool) -> list[int]:
    """Long texts are encoded on a thread: streams go on meanwhile."""
    if len(text) <= INLINE_CHARACTERS:
        return model.text.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(model.text.encode, text, add_special_tokens=add_special_tokens)
