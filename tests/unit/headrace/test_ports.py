import socket

import pytest

from headrace.ports import free_port, port_is_free


def test_a_port_is_given_once_and_is_none_that_the_system_gives() -> None:
    given = [free_port() for _ in range(50)]
    assert len(set(given)) == 50
    assert not any(32_768 <= port <= 60_999 for port in given), "as Linux has it where nobody set another range"


def test_what_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        port = server.getsockname()[1]
        assert not port_is_free("127.0.0.1", port)
        monkeypatch.setattr("headrace.ports.FIRST", port)
        monkeypatch.setattr("headrace.ports.LAST", port + 9)
        assert port not in {free_port() for _ in range(10)}
        monkeypatch.setattr("headrace.ports.LAST", port)
        with pytest.raises(OSError, match=f"no port from {port} to {port} is free"):
            free_port()
    assert port_is_free("127.0.0.1", port)
