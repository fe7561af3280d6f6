import pytest

from headrace.deployments import Deployment
from headrace.values import Role


def test_a_deployment_is_read_as_it_is_written() -> None:
    assert Deployment.parse("2U:512") == Deployment("2U", 0, 2, 512, 512)
    assert Deployment.parse("3P1D") == Deployment("3P1D", 3, 1, 2048, 2048)
    assert Deployment.parse("1P1D:4096") == Deployment("1P1D", 1, 1, 4096, 4096)
    assert Deployment.parse("1P1D+") == Deployment("1P1D+", 1, 1, 2048, 2048, placed=True)
    assert Deployment.parse("1P1D+tight/256:1024") == Deployment("1P1D+tight/256", 1, 1, 1024, 256, True, "tight")
    assert Deployment.parse("2U+code:256") == Deployment("2U+code", 0, 2, 256, 256, True, "code")


@pytest.mark.parametrize("text", ["2U", "2U+/64:256", "1P1D/256", "1P1D:", "P1D", ""])
def test_what_names_no_deployment_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"got {text.replace('+', '[+]')}$"):
        Deployment.parse(text)


def test_its_workers_have_the_roles_and_chunks_of_its_name() -> None:
    split, pool = Deployment.parse("1P2D+tight/256:1024"), Deployment.parse("2U:512")
    assert (split.num_gpus, split.roles) == (3, (Role.PREFILL, Role.DECODE, Role.DECODE))
    assert [split.step_tokens(role) for role in (Role.PREFILL, Role.DECODE)] == [1024, 256]
    assert (pool.num_gpus, pool.roles, pool.step_tokens(Role.UNIFIED)) == (2, (Role.UNIFIED, Role.UNIFIED), 512)
