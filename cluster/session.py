"""What `headrace up` leaves for the other commands: one folder a cluster, under the user's state folder.

    <state>/<cluster>/session.json      where the cluster answers, and what belongs to it
    <state>/<cluster>/up.alive          locked for as long as `headrace up` lives
    <state>/<cluster>/<child>.alive     locked for as long as that child (router, redis) lives
    <state>/<cluster>/headrace.yaml     the configuration in force, ports and URLs filled in
    <state>/<cluster>/<process>.log

<state> is $HEADRACE_STATE, else $XDG_STATE_HOME/headrace, else ~/.local/state/headrace. A lock ends with the process
that holds it, however it ends, and a process id is believed only while its lock is held: no other process is ever
mistaken for one of ours.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace

from headrace.config import TlsConfig
from headrace.errors import ConfigError
from headrace.store import public
from headrace.tls import ClientTls

UP = "up"


@dataclass(frozen=True, slots=True)
class Session:
    """One running cluster. `children`: process ids by name. `ray_address` is empty when Ray is the session's own, and
    ends with it. `ready` once it serves. `console_url` is empty where no console is served. `tls`: where routers speak it,
    how to meet them, as client_tls says it; the addresses say that they do."""

    cluster: str
    pid: int
    config_path: str
    model_name: str
    http_url: str
    grpc_address: str
    redis_url: str
    ray_address: str = ""
    children: Mapping[str, int] = field(default_factory=dict)
    ready: bool = False
    console_url: str = ""
    tls: Mapping[str, str | None] | None = None

    @property
    def client_tls(self) -> ClientTls | None:
        return ClientTls(**self.tls) if self.tls is not None else None

    def shown(self) -> "Session":
        """Fit to be printed: without Redis' password."""
        return replace(self, redis_url=public(self.redis_url))


def remembered(tls: TlsConfig | None) -> Mapping[str, str | None] | None:
    """What a session says of it."""
    its = ClientTls.of(tls)
    return asdict(its) if its is not None else None


class SessionFolder:
    """The folder of one cluster. Only the process that holds `up.alive` writes in it."""

    def __init__(self, cluster: str, root: pathlib.Path | None = None, *, until_exit: bool = False) -> None:
        """`until_exit`: what owned() locks stays locked until this process is gone, its exit handlers included."""
        self.cluster = cluster
        self._until_exit = until_exit
        self.path = (root or state_root()) / cluster

    @property
    def config_path(self) -> pathlib.Path:
        return self.path / "headrace.yaml"

    def log(self, name: str) -> pathlib.Path:
        return self.path / f"{name}.log"

    def lock(self, name: str) -> pathlib.Path:
        return self.path / f"{name}.alive"

    def child_alive(self, name: str) -> bool:
        return is_locked(self.lock(name))

    def wait_child(self, name: str, seconds: float) -> bool:
        """Waits until the child is gone; whether that came in time."""
        return wait_unlocked(self.lock(name), seconds)

    def read(self) -> Session | None:
        try:
            return Session(**json.loads((self.path / "session.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, session: Session) -> None:
        """In one step: a reader sees the old content or the new."""
        partial = self.path / ".session.json"
        partial.write_text(json.dumps(asdict(session), indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self.path / "session.json")

    def clear(self) -> None:
        """The session is over; logs and the configuration stay for whoever asks why."""
        (self.path / "session.json").unlink(missing_ok=True)

    @contextlib.contextmanager
    def owned(self) -> Iterator[None]:
        """Makes the folder ours. ConfigError when the cluster runs already."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self.lock(UP), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while not _try_lock(descriptor, fcntl.LOCK_EX):  # again only while somebody looks, which takes an instant
                if self.running:
                    raise ConfigError(
                        f"a cluster named {self.cluster!r} runs already: end it with `headrace down`, or give this one "
                        "another `name`",
                        key="name",
                        value=self.cluster,
                    )
            if self._until_exit:
                os.dup(descriptor)
            yield
        finally:
            os.close(descriptor)

    @property
    def running(self) -> bool:
        """Whether its `headrace up` lives."""
        return is_locked(self.lock(UP))


def state_root() -> pathlib.Path:
    if own := os.environ.get("HEADRACE_STATE"):
        return pathlib.Path(own)
    base = os.environ.get("XDG_STATE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".local" / "state") / "headrace"


def all_folders(root: pathlib.Path | None = None) -> list[SessionFolder]:
    """The folders that hold a session, alive or left behind."""
    root = root or state_root()
    if not root.is_dir():
        return []
    return [SessionFolder(path.name, root) for path in sorted(root.iterdir()) if (path / "session.json").is_file()]


def find(cluster: str | None, root: pathlib.Path | None = None) -> SessionFolder:
    """The folder of `cluster`, or of the only cluster there is. ConfigError says which there are."""
    folders = all_folders(root)
    if cluster is not None:
        folders = [folder for folder in folders if folder.cluster == cluster]
        if not folders:
            raise ConfigError(f"no cluster named {cluster!r} runs here", key="cluster", value=cluster)
    if not folders:
        raise ConfigError("no cluster runs here: start one with `headrace up`")
    if len(folders) > 1:
        names = ", ".join(folder.cluster for folder in folders)
        raise ConfigError(f"several clusters run here ({names}): name one with --cluster")
    return folders[0]


def is_locked(path: pathlib.Path) -> bool:
    """Whether a living process holds the lock. A look is shared: it is no lock to others who look."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not _try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def wait_unlocked(path: pathlib.Path, seconds: float) -> bool:
    """Waits until nobody holds the lock; whether that came in time."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    # flock knows no timeout, so a thread waits; it ends with this process if the lock never comes.
    waiter = threading.Thread(target=_lock_and_close, args=(descriptor,), daemon=True)
    waiter.start()
    waiter.join(seconds)
    return not waiter.is_alive()


def open_lock(path: pathlib.Path) -> int:
    """A descriptor that holds the lock, to be passed on to a child: the lock lives as long as the child does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _lock_and_close(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)
