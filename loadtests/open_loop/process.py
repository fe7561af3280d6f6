"""What a process that only makes load sets for itself, before it begins."""

import gc
import resource

COLLECT_AFTER = 200_000


def ready() -> None:
    """As many files as the host allows, for a stream over HTTP is one; and few pauses: collecting garbage among thousands
    of streams takes tens of milliseconds, which would be read as the server's."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 50, 1000)
