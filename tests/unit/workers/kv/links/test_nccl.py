"""What a link over NCCL finds in the environment. The link itself: tests/contract, with two GPUs."""

import os

import pytest

pytestmark = pytest.mark.torch


def test_nccl_which_reads_the_environment_with_its_first_message_finds_no_multicast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nccl = pytest.importorskip("workers.kv.links.nccl", reason="triton is not installed")
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    with nccl._as_we_need():
        assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"
