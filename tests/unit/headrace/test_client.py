import pytest

from headrace.client import AsyncClient, Client
from headrace.errors import ConfigError
from headrace.tls import ClientTls


@pytest.mark.parametrize(
    "address", ["h:1", "10.0.0.1:50051", "[::1]:1", "grpcs://h:1", "grpcs://h", "dns:///h", "unix:/x"]
)
def test_whatever_names_a_server_is_an_address(address: str) -> None:
    with Client(address):
        pass


@pytest.mark.parametrize(
    "address", ["http://h:1", "grpc://h:1", "https://h", "h", "h:", "::1:1", "h:port", "h:1/v1", ""]
)
async def test_whatever_names_none_is_refused_with_the_forms_that_do(address: str) -> None:
    for client in (Client, AsyncClient):
        with pytest.raises(ConfigError, match=r"^address: must be HOST:PORT, .* or grpcs://HOST:PORT by TLS") as caught:
            client(address)
        assert f"got {address!r}" in caught.value.message


def test_by_tls_a_name_alone_will_do() -> None:
    with Client("h", tls=ClientTls()):
        pass
