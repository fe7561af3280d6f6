from tests.unit.workers.rig import a_request, a_worker


async def test_one_worker_serves() -> None:
    async with a_worker() as rig, rig.router() as router:
        answer = await router.submit(a_request(max_tokens=6)).end()
        assert answer.error is None
        assert len(answer.tokens[0]) == 6
        await rig.idle()
