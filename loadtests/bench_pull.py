"""Pulls of a peer's blocks over the link: two processes, each of which sees its own device alone.

The owner allocates an exportable pool with its epoch words behind it and hands over a descriptor; the reader maps it,
checks what it pulls, and times it. Shape: Llama-3.1-8B, bf16, blocks of 32 tokens of 4 MiB: 128 of them are 512 MiB.
"""

import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from kernels.pull_blocks import MappedWords, PullShape, count_stale, pull_blocks
from kernels.tuning import PullTile, tuning_of
from workers.kv.device_memory import MappedMemory

HEADS, LAYERS, LAYER_BYTES = 8, 32, 2 * 32 * 128 * 2
BLOCK_BYTES = HEADS * LAYERS * LAYER_BYTES
NUM_BLOCKS, NUM_PULLED = 1024, 128
POOL_BYTES = NUM_BLOCKS * BLOCK_BYTES
WHOLE = (0, 0, HEADS, 0, 0, LAYERS)


def content(first_word: Tensor | int, words: Tensor) -> Tensor:
    """What the owner wrote at a word of its pool: no two near words alike."""
    return ((words + first_word) * 2654435761 % 2147483629).to(torch.int32)


def own(path: str) -> None:
    """The owner's process: serves one reader, and moves the epochs of the blocks it is told to."""
    device = torch.device("cuda", 0)
    torch.zeros(1, device=device)
    memory = MappedMemory.allocate(POOL_BYTES + NUM_BLOCKS * 8, 0)
    everything = torch.as_tensor(memory, device=device)
    pool, epochs = everything[:POOL_BYTES].view(torch.int32), everything[POOL_BYTES:].view(torch.int64)
    step = 2**26
    for first in range(0, pool.numel(), step):
        pool[first : first + step] = content(first, torch.arange(min(step, pool.numel() - first), device=device))
    epochs[:NUM_BLOCKS] = torch.arange(NUM_BLOCKS, device=device) + 7
    torch.cuda.synchronize()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        connection, _ = listener.accept()
        with connection:
            socket.send_fds(connection, [memory.num_bytes.to_bytes(8, "little")], [memory.export()])
            while moved := connection.recv(2):
                epochs[int.from_bytes(moved, "little")] += 1
                torch.cuda.synchronize()
                connection.sendall(b"k")


def measure_pull(device: torch.device) -> Iterator[tuple[str, float, str, list[float]]]:
    """Rows of (name, value, unit, samples). The caller's process is the reader and must see one device only."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "pool")
        owner = subprocess.Popen(
            [sys.executable, "-m", "loadtests.bench_pull", path], env={**os.environ, "CUDA_VISIBLE_DEVICES": "1"}
        )
        try:
            yield from _read(path, owner, device)
        finally:
            owner.kill()
            owner.wait()


def _read(
    path: str, owner: "subprocess.Popen[bytes]", device: torch.device
) -> Iterator[tuple[str, float, str, list[float]]]:
    target = torch.empty(NUM_BLOCKS * BLOCK_BYTES // 4, dtype=torch.int32, device=device)
    with socket.socket(socket.AF_UNIX) as connection:
        while connection.connect_ex(path):
            if owner.poll() is not None:
                raise ConnectionError(f"the owner ended with {owner.returncode} before it listened")
            torch.cuda._sleep(10_000_000)
            torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        size, descriptors, _, _ = socket.recv_fds(connection, 8, 1)
        peer = MappedMemory.of_descriptor(descriptors[0], int.from_bytes(size, "little"), 0)
        yield "attach_memory_bytes", float(free - torch.cuda.mem_get_info()[0]), "bytes", []
        source = MappedWords(peer.address)
        _check(source, target, device)
        _check_epochs(MappedWords(peer.address + POOL_BYTES, torch.int64), connection, device)

        from cuda.bindings import driver

        def plain() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            driver.cuMemcpyDtoDAsync(target.data_ptr(), peer.address, NUM_PULLED * BLOCK_BYTES, stream)

        samples = _gbps(plain, NUM_PULLED * BLOCK_BYTES, start, end)
        yield "plain_copy_512mib_gbps", statistics.median(samples), "gbps", samples
        tile = tuning_of(device).pull
        tiles = [(f"p{p}_w{w}", PullTile(p, w, 16)) for w in (4096, 8192, 16384) for p in (8, 16, 32, 64, 132)]
        for label, ranges, used in (
            ("512mib", WHOLE, tile),
            ("half_the_heads", (4, 0, 4, 0, 0, LAYERS), tile),
            ("half_the_layers", (0, 0, HEADS, 16, 0, 16), tile),
            *((f"512mib_{name}", WHOLE, used) for name, used in tiles),
        ):
            blocks = [torch.randperm(NUM_BLOCKS, device=device)[:NUM_PULLED].to(torch.int32) for _ in range(2)]
            shape = _shape(ranges)
            moved = NUM_PULLED * shape.num_runs * shape.run_words * 4
            samples = _gbps(
                lambda b=blocks, s=shape, t=used: pull_blocks(source, target, b[0], b[1], s, t), moved, start, end
            )
            yield f"pull_{label}_gbps", statistics.median(samples), "gbps", samples
        small = [torch.randperm(NUM_BLOCKS, device=device)[:4].to(torch.int32) for _ in range(2)]
        shape = _shape(WHOLE)
        samples = _gbps(
            lambda: pull_blocks(source, target, small[0], small[1], shape, tile), 4 * BLOCK_BYTES, start, end
        )
        yield "pull_16mib_gbps", statistics.median(samples), "gbps", samples
        torch.cuda.synchronize()
        peer.close()


def _shape(ranges: tuple[int, int, int, int, int, int]) -> PullShape:
    source_head, target_head, num_heads, source_layer, target_layer, num_layers = ranges
    return PullShape.of(
        LAYER_BYTES,
        HEADS,
        LAYERS,
        HEADS,
        LAYERS,
        source_head=source_head,
        target_head=target_head,
        num_heads=num_heads,
        source_layer=source_layer,
        target_layer=target_layer,
        num_layers=num_layers,
    )


def _check(source: MappedWords, target: Tensor, device: torch.device) -> None:
    """Whole blocks, a head range and a layer range: what was asked for, and nothing else, changes."""
    words = LAYER_BYTES // 4
    slab = target.view(NUM_BLOCKS, HEADS, LAYERS, words)
    for ranges in (WHOLE, (4, 1, 3, 0, 0, LAYERS), (2, 0, 5, 7, 20, 11)):
        target.fill_(-1)
        blocks = [torch.randperm(NUM_BLOCKS, device=device)[:33].to(torch.int32) for _ in range(2)]
        pull_blocks(source, target, blocks[0], blocks[1], _shape(ranges), tuning_of(device).pull)
        source_head, target_head, heads, source_layer, target_layer, layers = ranges
        for i in (0, 16, 32):
            head = source_head + torch.arange(heads, device=device).view(-1, 1, 1)
            layer = source_layer + torch.arange(layers, device=device).view(-1, 1)
            word = ((int(blocks[0][i]) * HEADS + head) * LAYERS + layer) * words + torch.arange(words, device=device)
            got = slab[int(blocks[1][i]), target_head : target_head + heads, target_layer : target_layer + layers]
            if not torch.equal(got, content(0, word)):
                raise ValueError(f"pulled block {i} of {ranges} differs from what its owner wrote")
        written = int((target != -1).sum())
        if written != 33 * heads * layers * words:
            raise ValueError(f"{ranges} must write {33 * heads * layers * words} words, wrote {written}")


def _check_epochs(epochs: MappedWords, connection: socket.socket, device: torch.device) -> None:
    """The reader sees the owner's words move."""
    blocks = torch.randperm(NUM_BLOCKS, device=device)[:200].to(torch.int32)
    expected = blocks.long() + 7
    stale = torch.zeros(1, dtype=torch.int32, device=device)
    for moved in range(4):
        count_stale(epochs, blocks, expected, stale.zero_())
        if stale.item() != moved:
            raise ValueError(f"{moved} of the blocks moved, the reader saw {stale.item()}")
        connection.sendall(int(blocks[moved]).to_bytes(2, "little"))
        connection.recv(1)


def _gbps(run: object, num_bytes: int, start: torch.cuda.Event, end: torch.cuda.Event) -> list[float]:
    assert callable(run)
    samples = []
    for _ in range(9):
        start.record()
        for _ in range(4):
            run()
        end.record()
        torch.cuda.synchronize()
        samples.append(4 * num_bytes / start.elapsed_time(end) / 1e6)
    return samples[2:]


if __name__ == "__main__":
    own(sys.argv[1])
