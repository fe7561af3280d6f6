"""Who may look."""

import pytest

from cluster.console.guard import Admitted, Guard, Refused
from headrace.errors import ConfigError
from router.keyring import Keyring

KEYS = Keyring({"default": ["operator"], "acme": ["theirs"]})


@pytest.mark.parametrize("host", ["localhost:8002", "127.0.0.1:8002", "[::1]:8002", "localhost", "127.0.0.1"])
def test_without_keys_this_machine_may_look_by_a_name_of_its_own(host: str) -> None:
    assert Guard(Keyring({})).admit(None, "127.0.0.1", host) == Admitted()


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("10.0.0.7", "localhost:8002"),
        ("10.0.0.7", "10.0.0.1:8002"),
        ("127.0.0.1", "rebound.example:8002"),
        ("127.0.0.1", "127.0.0.1.rebound.example"),
        ("127.0.0.1", "localhost.rebound.example:80"),
        ("127.0.0.1", ""),
        ("", "localhost"),
    ],
)
def test_without_keys_nobody_else_may_and_no_name_that_was_rebound(peer: str, host: str) -> None:
    answer = Guard(Keyring({})).admit(None, peer, host)
    assert isinstance(answer, Refused)
    assert answer.status == 403


@pytest.mark.parametrize(
    ("authorization", "status"),
    [(None, 401), ("Bearer nobody", 401), ("Basic operator", 401), ("Bearer theirs", 403)],
)
def test_with_keys_the_operator_alone_may_look_from_anywhere(authorization: str | None, status: int) -> None:
    assert Guard(KEYS).admit("Bearer operator", "10.0.0.7", "console.example") == Admitted()
    answer = Guard(KEYS).admit(authorization, "127.0.0.1", "localhost")
    assert isinstance(answer, Refused)
    assert answer.status == status


def test_where_keys_cannot_be_read_nobody_may_look() -> None:
    answer = Guard(ConfigError("tenants.acme.key_env: not set")).admit("Bearer operator", "127.0.0.1", "localhost")
    assert answer == Refused(503, "the console is closed: tenants.acme.key_env: not set")
