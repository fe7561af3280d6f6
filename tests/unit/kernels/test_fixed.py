"""The operations of `deterministic: true`, kernels in Triton's interpreter. Their bits: tests/gpu/test_deterministic."""

import pytest
import torch

from kernels import fixed_linear
from kernels.reference_fixed import FixedReferenceOps
from kernels.tuning import LinearTile, PrefillTile
from tests.unit.kernels.fixed_checks import check_fixed_attention, check_fixed_linear

pytestmark = [pytest.mark.torch, pytest.mark.interpreter]
CPU = torch.device("cpu")


def test_linear_in_parts_together_and_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_linear, "FILLING", 8)
    check_fixed_linear((2, 300), 50, 32, LinearTile(16, 16, 2), CPU, torch.float32)


def test_linear_of_one_part() -> None:
    check_fixed_linear((5,), 16, 7, LinearTile(16, 16, 2), CPU, torch.float32)


@pytest.mark.parametrize("rows", [[(1, 33), (1, 0), (9, 64), (20, 51)], [(3, 0), (2, 5)]], ids=["mixed", "padding"])
def test_attention(rows: list[tuple[int, int]]) -> None:
    check_fixed_attention(rows, 3, 2, 16, 32, PrefillTile(16, 16, 4, 2), CPU, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_the_reference_are_the_same_wherever_they_stand(dtype: torch.dtype) -> None:
    ops, generator = FixedReferenceOps(), torch.Generator().manual_seed(1)
    x = torch.randn(21, 90, generator=generator).to(dtype)
    weight, scale = torch.randn(33, 90, generator=generator).to(dtype), torch.randn(90, generator=generator).to(dtype)
    for of_rows in (lambda x: ops.linear(x, weight), lambda x: ops.rms_norm(x, scale, 1e-5), ops.silu_mul):
        whole = of_rows(x)
        for first, last in ((0, 1), (3, 4), (5, 14), (20, 21)):
            assert torch.equal(of_rows(x[first:last]), whole[first:last])
