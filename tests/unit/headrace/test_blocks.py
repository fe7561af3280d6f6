import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.blocks import ID_BYTES, ROOT, BlockHasher, pack_tokens, unpack_tokens

DOMAINS = {
    "plain": {"revision": "rev-1", "kv_format": "float32//1", "block_size": 4},
    "adapter": {"revision": "rev-1", "kv_format": "float32//1", "block_size": 4, "adapter": "x"},
    "salt": {"revision": "rev-1", "kv_format": "float32//1", "block_size": 4, "cache_salt": "x"},
}
# What every build must compute for tokens 0..11: a change here is a new HASH_VERSION.
GOLDEN = {
    "plain": [
        "9c0fa00ed9db569d5f0c7cd972a1fd8a",
        "14e7d77d243783882f3048b8fce78236",
        "d86a1715aa5c786a4e923665780b8d93",
    ],
    "adapter": [
        "2860bbbb24b4d82883ae61c56db2fe2e",
        "4c88abcbe65852059a2b3c9e7d0cde5c",
        "57cca71292a2a8c00a96113d74fa82cb",
    ],
    "salt": [
        "77c7d83a3d197a89d6087e18472329ef",
        "4d5565b73f0945803164d54e73aec621",
        "ec6e006ff70e4f4626a67b43fe06f781",
    ],
}


def hasher(**changes: object) -> BlockHasher:
    return BlockHasher(**({**DOMAINS["plain"], **changes}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", DOMAINS)
def test_golden_vectors(name: str) -> None:
    ids = BlockHasher(**DOMAINS[name]).chain(range(12))  # type: ignore[arg-type]
    assert [block.hex() for block in ids] == GOLDEN[name]


@pytest.mark.parametrize("seed", ["0", "1", "4242", "random"])
def test_case_34_ids_are_the_same_in_every_process(seed: str) -> None:
    program = (
        "from headrace.blocks import BlockHasher\n"
        "h = BlockHasher(revision='rev-1', kv_format='float32//1', block_size=4)\n"
        "print(*(block.hex() for block in h.chain(range(12))))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == GOLDEN["plain"]


def test_case_35_each_part_of_the_domain_separates() -> None:
    """Also where two domains would read the same if their parts were merely joined."""
    domains = [
        hasher(),
        hasher(revision="rev-2"),
        hasher(kv_format="fp8//1"),
        hasher(adapter="x"),
        hasher(cache_salt="x"),
        hasher(adapter="x", cache_salt="y"),
        hasher(adapter="y", cache_salt="x"),
        hasher(adapter="xy"),
        hasher(cache_salt="xy"),
        hasher(revision="rev-1float32//1", kv_format=""),
        hasher(revision="rev-", kv_format="1float32//1"),
    ]
    ids = [next(domain.chain(range(4))) for domain in domains]
    assert len(set(ids)) == len(ids)


def test_block_size_separates_also_where_the_tokens_are_the_same() -> None:
    whole = next(hasher(block_size=8).chain(range(8)))
    assert whole not in set(hasher(block_size=4).chain(range(8)))


def test_only_full_blocks_have_an_id_and_each_names_its_whole_prefix() -> None:
    domain = hasher()
    assert list(domain.chain(range(3))) == []
    assert len(list(domain.chain(range(11)))) == 2
    first, second = domain.chain(range(8))
    other_first, other_second = domain.chain([9, 1, 2, 3, 4, 5, 6, 7])
    assert first != other_first
    assert second != other_second
    assert len(first) == ID_BYTES


def test_a_chain_goes_on_from_any_parent() -> None:
    domain = hasher()
    first, *rest = domain.chain(range(16))
    assert list(domain.chain(range(4, 16), parent=first)) == rest
    assert domain.child(ROOT, pack_tokens(range(4))) == first


def test_a_block_holds_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        hasher(block_size=0)


def test_tokens_are_packed_as_little_endian_int32() -> None:
    assert pack_tokens([1, 258]) == b"\x01\x00\x00\x00\x02\x01\x00\x00"


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_packed_tokens_come_back(token_ids: list[int]) -> None:
    assert unpack_tokens(pack_tokens(token_ids)) == token_ids


def test_cut_tokens_are_an_error() -> None:
    with pytest.raises(ValueError):
        unpack_tokens(b"\x01\x00\x00")


@given(st.lists(st.integers(0, 100), max_size=40), st.lists(st.integers(0, 100), max_size=40))
def test_two_prompts_share_exactly_their_common_full_blocks(one: list[int], two: list[int]) -> None:
    domain = hasher()
    shared = 0
    while shared < min(len(one), len(two)) and one[shared] == two[shared]:
        shared += 1
    pairs = zip(domain.chain(one), domain.chain(two), strict=False)
    assert [a == b for a, b in pairs].count(True) == shared // 4
