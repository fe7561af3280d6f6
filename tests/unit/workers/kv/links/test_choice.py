"""Which link joins two ranks, from their endpoints; and endpoints as strings."""

import pytest

from headrace.errors import IncompatiblePeer
from workers.kv.links.choice import Choice, all_await_steps, choose
from workers.kv.links.endpoint import Endpoint, Place, this_machine


def endpoint(*schemes: str, machine: str = "", device: str = "") -> str:
    return str(Endpoint(schemes, "secret", "10.0.0.1", 4711, Place(machine, device)))


@pytest.mark.parametrize("host", ["10.0.0.1", "fd00::1", "node-7.example"])
@pytest.mark.parametrize("place", [Place(), Place("boot.42", "GPU-1a:2b"), Place(device="GPU 0")])
def test_an_endpoint_is_what_it_was_when_it_is_read_again(host: str, place: Place) -> None:
    made = Endpoint(("nvlink", "nccl"), "to-ken", host, 4711, place)
    assert Endpoint.parse(str(made)) == made


@pytest.mark.parametrize("text", ["", "gloo://", "gloo://host:1", "gloo://token@host", "gloo://t@h:x", "t@h:1"])
def test_what_is_no_endpoint_is_refused_and_its_secret_not_shown(text: str) -> None:
    with pytest.raises(IncompatiblePeer, match="must be scheme://token@host:port") as refused:
        Endpoint.parse(text)
    assert "secret" not in str(refused.value)


def test_pools_in_host_memory_take_gloo() -> None:
    assert choose(endpoint("gloo"), endpoint("gloo")) == Choice("gloo", "the pools are in host memory")


@pytest.mark.parametrize(("device", "reason"), [("A", "both ranks use one GPU"), ("B", "the GPUs are in one machine")])
def test_gpus_of_one_machine_take_nvlink(device: str, reason: str) -> None:
    here = endpoint("nvlink", "nccl", machine="m", device="A")
    there = endpoint("nvlink", "nccl", machine="m", device=device)
    assert choose(here, there) == Choice("nvlink", reason)


def test_gpus_of_two_machines_take_what_else_both_offer() -> None:
    here, there = (endpoint("nvlink", "nccl", machine=machine, device="A") for machine in "mn")
    assert choose(here, there).scheme == "nccl"


def test_steps_are_awaited_only_where_every_rank_can_see_them_end() -> None:
    here, there = (endpoint("nvlink", "nccl", machine=machine) for machine in "mn")
    assert all_await_steps([here, here], [here])
    assert not all_await_steps([here], [here, there]), "the second rank is read over nccl"


def test_rdma_joins_what_is_asked_for_it_on_both_sides_and_shares_no_machine() -> None:
    asked = [endpoint("nvlink", "nixl", "nccl", machine=machine, device="A") for machine in "mn"]
    plain = endpoint("nvlink", "nccl", machine="n", device="A")
    assert choose(*asked) == Choice("nixl", "both workers are asked for RDMA (handoff.rdma)")
    assert (choose(asked[0], plain).scheme, choose(plain, asked[0]).scheme) == ("nccl", "nccl")
    assert choose(endpoint("nixl", "gloo"), endpoint("nixl", "gloo")).scheme == "nixl"
    assert choose(asked[0], endpoint("nvlink", "nixl", machine="m")).scheme == "nvlink"


@pytest.mark.parametrize("machine", ["n", ""])
def test_what_nothing_joins_is_refused_with_the_reason_and_no_secret(machine: str) -> None:
    here, there = endpoint("nvlink", machine="m"), endpoint("nvlink", machine=machine)
    with pytest.raises(IncompatiblePeer, match="nvlink on machine m, the other nvlink on machine") as refused:
        choose(here, there)
    assert "secret" not in str(refused.value)
    with pytest.raises(IncompatiblePeer, match=r"one offers gloo .* the other nvlink"):
        choose(endpoint("gloo"), there)


def test_an_unknown_machine_is_no_machine() -> None:
    assert not Place("", "A").shares_machine(Place("", "A"))
    assert this_machine() == this_machine() != ""
