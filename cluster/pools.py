"""Workers in a Ray cluster: where their ranks are placed, started, watched and ended.

One placement group a worker, one bundle a pipeline stage: a bundle lies on one node, so the tp ranks of a stage always
share a node (what STRICT_PACK gives), while stages may span nodes. The group is all that is ever asked of Ray: ranks
run inside its bundles, so a worker of tp × pp ranks needs exactly that many GPUs. Ranks are actors that Ray never
restarts; a new generation replaces them. Groups and actors are detached and named, so that they survive the controller
and its next life finds them again.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # which nodes drain, it alone says
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.util import list_named_actors, placement_group, placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.actors import EngineActor, RankActor
from headrace.errors import HeadraceError, WorkerLost
from headrace.values import ParallelLayout
from workers.spec import WorkerSpec

ADOPT_SECONDS = 60.0
ADOPT_LOOK_SECONDS = 3.0  # shorter than a controller's lease of the lead, which it renews between two looks
WATCH_SECONDS = 60.0
GRACE_SECONDS = 30.0
MARGIN_SECONDS = 10.0
NO_HURRY_SECONDS = 600.0
SAID_SECONDS = 3.0  # a head that is slow once is no trouble
NOTICE_SECONDS = 1.0  # that Ray's head may take to say which nodes go

WAITING = "waits for "  # how a start that has no room yet begins to say so
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank runs: its bundle, and what it takes of it."""

    rank: int
    bundle: int
    resources: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Placement:
    """One worker's placement group, and its ranks in it."""

    bundles: tuple[Mapping[str, float], ...]
    strategy: str
    ranks: tuple[RankPlace, ...]


def plan_placement(layout: ParallelLayout, rank_resources: Mapping[str, float]) -> Placement:
    """One bundle a stage, tp × `rank_resources` big; what all bundles hold is exactly what all ranks take."""
    bundle = {name: amount * layout.tp for name, amount in rank_resources.items()}
    ranks = tuple(RankPlace(rank, rank // layout.tp, rank_resources) for rank in range(layout.world_size))
    return Placement((bundle,) * layout.pp, "STRICT_PACK" if layout.pp == 1 else "PACK", ranks)


def actor_name(worker_id: str, generation: int, rank: int) -> str:
    return f"{worker_id}/{generation}/{rank}"


def parse_actor_name(name: str) -> tuple[str, int, int] | None:
    """(worker id, generation, rank), or None when it is no rank's name."""
    parts = name.split("/")
    if len(parts) != 3 or not (parts[1].isdigit() and parts[2].isdigit()):
        return None
    return parts[0], int(parts[1]), int(parts[2])


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a worker answers: its service (gRPC) and its metrics (HTTP)."""

    service: str = ""
    metrics: str = ""


@dataclass(frozen=True, slots=True)
class Adopted:
    """A worker of an earlier controller: it serves, or has no addresses yet and loads."""

    spec: WorkerSpec
    addresses: Addresses


class Unsaid:
    """What a rank is that did not answer in time: alive, as far as anybody knows."""


class RayPools:
    """Owns the handles of all rank actors and placement groups of one cluster; called from one event loop."""

    def __init__(self, namespace: str, rank_resources: Callable[[str], Mapping[str, float]]) -> None:
        """`rank_resources(pool)`: what Ray sets aside for each rank of that pool."""
        self._namespace = namespace
        self._rank_resources = rank_resources
        self._ranks: dict[tuple[str, int], list[Any]] = {}
        self._groups: dict[tuple[str, int], PlacementGroup] = {}
        self._gcs: Any = None
        self._adopting_since: float | None = None
        self._head_silent_since: float | None = None
        self._asking: asyncio.Future[tuple[Mapping[str, float], Mapping[str, Any]]] | None = None

    async def start(self, spec: WorkerSpec, progress: Progress) -> Addresses:
        """Places and starts every rank; where the worker answers, once it is warm. WorkerLost, or what a rank
        failed with; whatever exists by then is remove()'s to end."""
        key = (spec.worker_id, spec.generation)
        pool = spec.worker_id.rpartition("-")[0]
        placement = plan_placement(spec.layout, self._rank_resources(pool))
        with named(spec.worker_id, spec.generation):
            group = placement_group(
                [dict(bundle) for bundle in placement.bundles],
                strategy=placement.strategy,
                name=self._group_name(*key),
                lifetime="detached",
            )
            self._groups[key] = group
            progress(f"{WAITING}{describe_resources(placement.bundles)}")
            await group.ready()
            progress("starts")
            ranks = [self._create(spec, place, group) for place in placement.ranks]
            self._ranks[key] = ranks
            meeting = await ranks[0].open.remote(spec)
            await asyncio.gather(*(rank.join.remote(spec, meeting, at) for at, rank in enumerate(ranks) if at))
            progress("loads")
            return await self._ready(key, ranks)

    async def resume(self, spec: WorkerSpec) -> Addresses:
        """start(), of an adopted worker that loads."""
        key = (spec.worker_id, spec.generation)
        with named(*key):
            return await self._ready(key, self._ranks[key])

    async def _ready(self, key: tuple[str, int], ranks: Sequence[Any]) -> Addresses:
        """Where the worker answers. A rank that ends before it joined is noticed here: rank 0 would wait for it."""
        ready = asyncio.ensure_future(_result(ranks[0].ready.remote()))
        ended = asyncio.ensure_future(self.ended(*key))
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                return Addresses(*ready.result())
            raise WorkerLost(ended.result())
        finally:
            ready.cancel()
            ended.cancel()

    async def ended(self, worker_id: str, generation: int) -> str:
        """Waits until any rank of a started worker has ended; why it did."""
        watches = [asyncio.ensure_future(_watch(rank)) for rank in self._ranks[worker_id, generation]]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            first = min(at for at, watch in enumerate(watches) if watch in done)
            return f"rank {first}: {watches[first].result()}"
        finally:
            for watch in watches:
                watch.cancel()

    async def drain(self, worker_id: str, generation: int) -> None:
        """Lets the worker finish what it has and end in order; returns when it has, however it did, or when its grace
        is well over."""
        ranks = self._ranks.get((worker_id, generation))
        if ranks:
            with contextlib.suppress(RayError, HeadraceError, TimeoutError):
                async with asyncio.timeout(GRACE_SECONDS + MARGIN_SECONDS):
                    await ranks[0].stop.remote()

    def remove(self, worker_id: str, generation: int) -> None:
        """Ends what is left of the worker and gives its resources back. Idempotent."""
        key = (worker_id, generation)
        for rank in self._ranks.pop(key, []):
            ray.kill(rank, no_restart=True)
        group = self._groups.pop(key, None)
        if group is not None:
            remove_placement_group(group)

    async def notices(self) -> Mapping[tuple[str, int], float]:
        """The workers that lie on nodes which are about to go, and in how many seconds. Ray's head may take its time, or be
        away: until it answers nothing is heard, and nobody waits."""
        if self._asking is None:
            self._head_silent_since = self._head_silent_since or time.monotonic()
            self._asking = asyncio.ensure_future(asyncio.to_thread(self._leaving))
        done, _ = await asyncio.wait({self._asking}, timeout=NOTICE_SECONDS)
        if not done:
            return {}
        asking, self._asking = self._asking, None
        try:
            leaving, groups = asking.result()
        except (RayError, OSError):
            return {}
        except Exception:
            self._head_silent_since = None  # it answers, if nothing that is understood here: workers start nevertheless
            raise
        self._head_silent_since = None
        nodes = {group_id: set(entry["bundles_to_node_id"].values()) for group_id, entry in groups.items()}
        found: dict[tuple[str, int], float] = {}
        for key, group in self._groups.items():
            deadlines = [leaving[node] for node in nodes.get(group.id.hex(), ()) if node in leaving]
            if deadlines:
                found[key] = max(min(deadlines) - time.time(), 0.0)
        return found

    @property
    def head_silent_seconds(self) -> float:
        """For how long notices() has had no answer by now; 0 where it had the last one. Whoever asks the head for anything
        else meanwhile waits as long, with all that it does."""
        since = self._head_silent_since
        return time.monotonic() - since if since is not None else 0.0

    @property
    def trouble(self) -> str:
        """What an operator should know of it."""
        seconds = self.head_silent_seconds
        if seconds < SAID_SECONDS:
            return ""
        return f"Ray's head has not answered for {seconds:.0f} s: what serves goes on, and nothing is started or ended"

    def _leaving(self) -> tuple[Mapping[str, float], Mapping[str, Any]]:
        leaving = self._draining_nodes()
        return leaving, placement_group_table() if leaving else {}

    def _draining_nodes(self) -> dict[str, float]:
        """By Ray's word (a spot notice, `ray drain-node`, a SIGTERM to `ray start --block`): when each is taken away, in
        seconds of the wall clock, which is all that Ray says. Where nobody says when, it is moved in good time."""
        if self._gcs is None:
            self._gcs = GcsClient(address=ray.get_runtime_context().gcs_address)
        found = self._gcs.get_draining_nodes(timeout=NOTICE_SECONDS)
        return {node: at / 1000 if at else time.time() + NO_HURRY_SECONDS for node, at in found.items()}

    async def adopt(self) -> list[Adopted] | None:
        """Finds the workers that an earlier controller left serving or loading; what is not whole is ended. None where one
        does not say yet what it is: to be called again, for ADOPT_SECONDS; then that one is ended."""
        self._adopting_since = self._adopting_since or time.monotonic()
        last = time.monotonic() - self._adopting_since > ADOPT_SECONDS
        found: dict[tuple[str, int], dict[int, Any]] = {}
        for entry in list_named_actors(all_namespaces=True):
            name = parse_actor_name(entry["name"]) if entry["namespace"] == self._namespace else None
            if name is not None:
                with contextlib.suppress(ValueError):
                    handle = ray.get_actor(entry["name"], namespace=self._namespace)
                    found.setdefault(name[:2], {})[name[2]] = handle
        groups = self._existing_groups()
        keys = sorted(found.keys() | groups.keys())
        whole = await asyncio.gather(*(_whole(found.get(key, {}) if key in groups else {}) for key in keys))
        if not last and any(isinstance(one, Unsaid) for one in whole):
            return None
        adopted: list[Adopted] = []
        for key, one in zip(keys, whole, strict=True):
            self._ranks[key] = [handle for _, handle in sorted(found.get(key, {}).items())]
            if key in groups:
                self._groups[key] = groups[key]
            if isinstance(one, Adopted):
                adopted.append(one)
            else:
                self.remove(*key)
        return adopted

    def _create(self, spec: WorkerSpec, place: RankPlace, group: PlacementGroup) -> Any:
        resources = dict(place.resources)
        kind, arguments = (EngineActor, (GRACE_SECONDS,)) if place.rank == 0 else (RankActor, ())
        return (
            ray.remote(kind)
            .options(
                name=actor_name(spec.worker_id, spec.generation, place.rank),
                namespace=self._namespace,
                lifetime="detached",
                num_cpus=resources.pop("CPU", 0),
                num_gpus=resources.pop("GPU", 0),
                resources=resources,
                max_restarts=0,
                max_concurrency=16,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=place.bundle, placement_group_capture_child_tasks=False
                ),
            )
            .remote(*arguments)
        )

    def _group_name(self, worker_id: str, generation: int) -> str:
        return f"{self._namespace}:{actor_name(worker_id, generation, 0)}"

    def _existing_groups(self) -> dict[tuple[str, int], PlacementGroup]:
        groups: dict[tuple[str, int], PlacementGroup] = {}
        for entry in placement_group_table().values():
            prefix, _, rest = str(entry["name"]).partition(":")
            name = parse_actor_name(rest)
            if prefix == self._namespace and name is not None and entry["state"] != "REMOVED":
                groups[name[:2]] = ray.util.get_placement_group(entry["name"])
        return groups


def describe_resources(bundles: Sequence[Mapping[str, float]]) -> str:
    """Such as "2 GPU on one node" or "2 × 4 GPU"."""
    each = ", ".join(f"{amount:g} {name}" for name, amount in bundles[0].items())
    return f"{each} on one node" if len(bundles) == 1 else f"{len(bundles)} × {each}"


async def _whole(ranks: Mapping[int, Any]) -> Adopted | Unsaid | None:
    """The worker of these ranks; None where it is not whole, or its start was cut before all ranks had joined."""
    if 0 not in ranks:
        return None
    try:
        async with asyncio.timeout(ADOPT_LOOK_SECONDS):
            spec, addresses = await ranks[0].describe.remote()
            if spec is None or len(ranks) != spec.layout.world_size:
                return None
            others = (
                [] if addresses is not None else [_result(rank.joined.remote()) for at, rank in ranks.items() if at]
            )
            joined = await asyncio.gather(*others)
    except (ActorUnavailableError, TimeoutError):
        return Unsaid()
    except (AttributeError, RayError):  # a rank of an older version cannot say whether it joined
        return None
    if not all(joined):
        return None
    return Adopted(spec, Addresses(*addresses) if addresses is not None else Addresses())


async def _result(reference: Any) -> Any:
    """Ray's reference as a coroutine, so that asyncio can wait for it beside others."""
    return await reference


async def _watch(rank: Any) -> str:
    """Waits until the rank ends; why it did."""
    try:
        while not await rank.watch.remote(WATCH_SECONDS):
            pass
    except (RayError, HeadraceError) as error:
        return why(error)
    return "ended"


def why(error: BaseException) -> str:
    """One line for a status table: what a rank failed with, or that its process is gone."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    if isinstance(error, HeadraceError):
        return error.message
    if isinstance(error, RayActorError):
        return "its process is gone"
    return f"{type(error).__name__}: {str(error).strip().splitlines()[-1] if str(error).strip() else ''}"


@contextlib.contextmanager
def named(worker_id: str, generation: int) -> Iterator[None]:
    """Whatever a worker's start fails with, as ours and with the worker's name: it ends that worker, and no controller.
    (Resources that Ray cannot set aside are a ValueError of its own.)"""
    try:
        yield
    except Exception as error:
        raise WorkerLost(f"{worker_id} (generation {generation}): {why(error)}") from error
