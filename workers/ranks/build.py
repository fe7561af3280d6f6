"""The executor of a worker, from its spec: its ranks joined, loaded and warm.

On one host, with the other ranks as child processes:

    executor = build_executor(spec)

With ranks that come from elsewhere (Ray actors):

    rendezvous = listen(spec.host, spec.rendezvous_token)          # in rank 0's process
    rank_main(rendezvous.address, spec.rendezvous_token, rank)     # in each other one; blocks until the worker ends
    executor = build_executor(spec, rendezvous)                    # in rank 0's process; blocks until all are warm

build_executor blocks (weights are loaded, graphs warmed): call it off the event loop.
"""

import secrets

from workers.kv.channel import Channel
from workers.ranks.group import RankExecutor, RankLimits
from workers.ranks.rank_runner import MakeRunner
from workers.ranks.rendezvous import Child, Rendezvous, end_all, listen, spawn_local
from workers.spec import WorkerSpec


def build_executor(
    spec: WorkerSpec,
    rendezvous: Rendezvous | None = None,
    *,
    make_runner: MakeRunner | None = None,
    limits: RankLimits | None = None,
) -> RankExecutor:
    """The executor of `spec`, all ranks joined, loaded and warm. Without a rendezvous the other ranks are child
    processes. `make_runner` None: workers.ranks.runner's.

    Raises what a rank failed with (CheckpointError, ConfigError, IncompatiblePeer, …) or WorkerLost when one is gone
    or late; nothing is left running then.
    """
    limits = limits or RankLimits()
    children: list[Child] = []
    channels: dict[int, Channel] = {}
    try:
        if rendezvous is None and spec.layout.world_size > 1:
            token = secrets.token_urlsafe(16)
            rendezvous = listen(spec.host, token)
            children = spawn_local(rendezvous.address, token, range(1, spec.layout.world_size))
            for rank, child in enumerate(children, start=1):
                rendezvous.watch(rank, child)
        if rendezvous is not None:
            channels = rendezvous.collect(spec.layout.world_size, limits.start_seconds)
        executor = RankExecutor(spec, channels, children, limits)
    except BaseException:
        end_all(children, 0.0)
        raise
    try:
        executor.start(make_runner or _runner_of_models())
    except BaseException:
        executor.close()
        raise
    return executor


def _runner_of_models() -> MakeRunner:
    from workers.ranks.runner import make_runner  # brings all models with it, which a test's own runner does not need

    return make_runner
