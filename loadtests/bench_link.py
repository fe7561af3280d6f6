"""How fast a rank reads a peer's blocks over gloo on this machine, beside a bare TCP stream of the same bytes.

    python -m loadtests.bench_link

Two processes, one thread of torch each. Prints a line a size, and one JSON object as its last line.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from workers.kv.layout import Piece, SlabLayout
from workers.kv.links import gloo
from workers.kv.links.base import BlockPull
from workers.kv.pool import KvPool

# Llama-3.1-8B at tp 8 in bf16, blocks of 32 tokens: 0.5 MiB each.
SLAB = SlabLayout(num_kv_heads=1, num_layers=32, block_size=32, head_dim=128, element_bytes=2)
WHOLE = Piece(0, 0, 0, 0, SLAB.num_kv_heads, 0, 0, SLAB.num_layers)
NUM_BLOCKS = 128
SIZES = (1, 16, 128)
RUNS = 9


def pool() -> KvPool:
    torch.set_num_threads(1)
    return KvPool(SLAB, NUM_BLOCKS, torch.bfloat16, torch.device("cpu"))


def serve() -> None:
    """The source's process: a pool to read from, and a bare stream of as many bytes as each connection asks for."""
    server = gloo.serve(pool(), "127.0.0.1", 30.0)
    with socket.create_server(("127.0.0.1", 0)) as bare:
        print(json.dumps([server.endpoint, bare.getsockname()[1]]), flush=True)
        content = bytes(NUM_BLOCKS * SLAB.block_bytes)
        stream, _ = bare.accept()
        with stream:
            while asked := stream.recv(8):
                stream.sendall(memoryview(content)[: int.from_bytes(asked, "little")])
    server.close()


def gigabytes_per_second(num_bytes: int, move: Callable[[], object]) -> list[float]:
    move()
    samples = []
    for _ in range(RUNS):
        began = time.perf_counter()
        move()
        samples.append(num_bytes / (time.perf_counter() - began) / 1e9)
    return samples


def read_bare(stream: socket.socket, into: memoryview) -> None:
    stream.sendall(len(into).to_bytes(8, "little"))
    while into:
        into = into[stream.recv_into(into) :]


def main() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "loadtests.bench_link", "serve"], stdout=subprocess.PIPE, text=True
    ) as source:
        assert source.stdout is not None
        endpoint, port = json.loads(source.stdout.readline())
        link = gloo.link(endpoint, pool(), 30.0)
        room = memoryview(bytearray(NUM_BLOCKS * SLAB.block_bytes))
        rows = []
        with socket.create_connection(("127.0.0.1", port)) as bare:
            for size in SIZES:
                blocks = [BlockPull(block, 0, block) for block in range(size)]
                num_bytes = size * SLAB.block_bytes
                ours = gigabytes_per_second(num_bytes, partial(link.pull, blocks, WHOLE))
                peer = gigabytes_per_second(num_bytes, partial(read_bare, bare, room[:num_bytes]))
                value, bound = statistics.median(ours), statistics.median(peer)
                print(
                    f"{num_bytes / 2**20:6.1f} MiB in {size:3} blocks  {value:6.2f} GB/s  (bare TCP {bound:.2f} GB/s)"
                )
                rows.append(
                    {
                        "name": f"gloo_{num_bytes // 2**10}kib_gbps",
                        "value": value,
                        "unit": "GB/s",
                        "better": "higher",
                        "samples": ours,
                        "peer": bound,
                        "peer_name": "bare TCP",
                        "ratio": value / bound,
                    }
                )
        link.close()
    print(json.dumps({"bench": "link", "cores": os.cpu_count(), "torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main()
