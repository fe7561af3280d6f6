"""A router process with TLS on both edges: who is heard, by which certificate, and a certificate that is renewed."""

import asyncio
import os
import pathlib
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace

import httpx
import pytest
from click.testing import CliRunner

from cluster.commands.options import Target
from cluster.commands.why import ask, command
from cluster.console.asking import Routers
from cluster.launch import _answers
from cluster.session import Session, SessionFolder
from headrace.client import AsyncClient, Client
from headrace.errors import InvalidRequest, Unauthenticated, Unavailable
from headrace.tls import ClientTls
from loadtests.open_loop.http_client import http_client
from tests.certificates import Pair, authority, signed
from tests.e2e.routers import null_info, running_router, say, soon, tiny_checkpoint
from tests.null_worker import NullWorker

SERVER = "router.llm.svc"


def put(pair: Pair, cert: pathlib.Path, key: pathlib.Path) -> None:
    """As a volume of Kubernetes' does it, each file at once."""
    for source, target in ((pair.key, key), (pair.cert, cert)):
        os.link(source, target.with_suffix(".new"))
        os.replace(target.with_suffix(".new"), target)


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.05)


async def refused_by_grpc(address: str, tls: ClientTls) -> bool:
    async with AsyncClient(address, tls=tls) as client:
        try:
            await client.models()
        except Unavailable:
            return True
    return False


async def test_mutual_tls_on_both_edges(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ca, other_ca = authority(tmp_path, "ca"), authority(tmp_path, "other")
    name = f"subjectAltName=DNS:{SERVER}"
    first, second = signed(tmp_path, "first", ca, name), signed(tmp_path, "second", other_ca, name)
    mine, strangers = signed(tmp_path, "mine", ca, name), signed(tmp_path, "strangers", other_ca, name)
    files = {name: str(tmp_path / f"tls.{name}") for name in ("crt", "key")}
    cert_file, key_file = map(pathlib.Path, files.values())
    put(first, cert_file, key_file)
    right = ClientTls(str(ca.cert), str(mine.cert), str(mine.key), SERVER)
    without = replace(right, cert_file=None, key_file=None)
    settings = {"cert_file": "tls.crt", "key_file": "tls.key", "client_ca_file": "ca.crt"}
    checkpoint = tiny_checkpoint(tmp_path)
    async with (
        NullWorker(null_info(checkpoint)) as worker,
        running_router(checkpoint, tmp_path / "h.yaml", [worker.address], tls=settings) as router,
    ):
        place = router.http.removeprefix("http://")
        url, named = f"https://{place}", {"extensions": right.extensions}

        # gRPC: only who shows a certificate of the client CA's is heard.
        async with AsyncClient(router.grpc, tls=right) as client:
            assert [model.id for model in await client.models()] == ["tiny"]
        assert await refused_by_grpc(router.grpc, without)
        assert await refused_by_grpc(
            router.grpc, replace(right, cert_file=str(strangers.cert), key_file=str(strangers.key))
        )
        assert await refused_by_grpc(router.grpc, replace(right, server_name="elsewhere"))
        assert await asyncio.to_thread(lambda: Client(router.grpc, tls=right).__enter__().model()) == "tiny"

        async with AsyncClient(router.grpc, tls=right, model="tiny") as client:
            answer = asyncio.ensure_future(anext(client.generate("hi")))
            say(worker, (await worker.submits.get()).key, [5, 6, 7])
            assert (await answer).token_ids == (5,)

        # HTTP: the same, but probes need none.
        async with httpx.AsyncClient(verify=right.context(), trust_env=False) as http:
            listed = await http.get(f"{url}/v1/models", **named)
            assert listed.status_code == 200
            body = {"model": "tiny", "prompt": "hi", "stream": True}
            stream = asyncio.ensure_future(http.post(f"{url}/v1/completions", json=body, **named))
            say(worker, (await worker.submits.get()).key, [5, 6, 7])
            assert (await stream).text.endswith("data: [DONE]\n\n")
            with pytest.raises(httpx.ConnectError, match="certificate"):
                await http.get(url.replace("127.0.0.1", "localhost"))
        async with httpx.AsyncClient(verify=without.context(), trust_env=False) as http:
            assert (await http.get(f"{url}/health", **named)).status_code == 200
            for path in ("/v1/models", "/metrics", "/requests", "/why/r"):
                refused = await http.get(f"{url}{path}", **named)
                assert refused.status_code == 401
                assert "client certificate" in refused.json()["error"]["message"]
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient(trust_env=False) as http:
                await http.get(f"http://{place}/health")

        # Whatever of ours talks to routers.
        with pytest.raises(InvalidRequest, match="no router knows"):
            await asyncio.to_thread(ask, [url], "r", None, right)
        with pytest.raises(Unauthenticated, match="client certificate"):
            await asyncio.to_thread(ask, [url], "r", None, without)
        for tls in (right, without):
            routers = Routers(None, tls)
            if tls is right:
                assert len(await routers.requests(place)) == 2
            else:
                with pytest.raises(Unavailable, match="client certificate"):
                    await routers.requests(place)
            await routers.close()
        await soon(_answers(f"{url}/ready"))
        async with http_client(url, tls=right) as load:
            assert (await load.served()).model == "tiny"
        monkeypatch.setenv("HEADRACE_STATE", str(tmp_path / "state"))
        folder = SessionFolder("c")
        with folder.owned():
            folder.write(Session("c", 1, "", "tiny", url, f"grpcs://{router.grpc}", "", tls=asdict(right)))
            said = await asyncio.to_thread(CliRunner().invoke, command, ["r"])
            async with Target(None, None, None, None).client() as client:
                assert await client.model() == "tiny"
        assert "no router knows request 'r'" in str(said.exception)

        # A renewed certificate, of another CA: new connections have it, and none is refused meanwhile.
        # Who stays, as a console does, has what its own files hold by then.
        trusted = tmp_path / "trusted"
        trusted.write_bytes(ca.cert.read_bytes())
        console = Routers(None, replace(right, ca_file=str(trusted)))
        put(second, cert_file, key_file)
        renewed = replace(right, ca_file=str(other_ca.cert))

        async def https_has_it() -> bool:
            try:
                async with httpx.AsyncClient(verify=renewed.context(), trust_env=False) as http:
                    return (await http.get(f"{url}/v1/models", **named)).status_code == 200
            except httpx.ConnectError:
                return False

        await until(https_has_it)
        trusted.write_bytes(other_ca.cert.read_bytes())

        async def console_knows_it() -> bool:
            try:
                return len(await console.requests(place)) == 2
            except Unavailable:
                return False

        await until(console_knows_it)
        await console.close()
        assert not await refused_by_grpc(f"grpcs://{router.grpc}", renewed)
        assert await refused_by_grpc(router.grpc, right)
