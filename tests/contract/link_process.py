"""One end of a link in a process of its own, to be stopped and killed: `source` serves, `target` pulls without end.

    python -m tests.contract.link_process source SCHEME '{"fault": "kill", "at": 20}'
    python -m tests.contract.link_process target SCHEME ENDPOINT

Its first line of output is its endpoint, or "pulling". It ends when its input does. Commands of a source, one a line:
{"epoch": [block, epoch]}.
"""

import json
import os
import signal
import sys
import threading

import torch

from tests.contract.links import MAKE, WHOLE, filled_pool, pulls_of

FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def source(scheme: str, fault: dict[str, object]) -> None:
    kind = MAKE[scheme]()
    pool = filled_pool(1, kind.source_device)

    def hook(index: int) -> None:
        if index == fault.get("at"):
            fault.pop("at")
            os.kill(os.getpid(), FAULTS[str(fault["fault"])])

    server = kind.serve(pool, hook)
    print(server.endpoint, flush=True)
    for line in sys.stdin:
        pool.set_epochs([json.loads(line)["epoch"]])
    server.close()


def target(scheme: str, endpoint: str) -> None:
    kind = MAKE[scheme]()
    pool = filled_pool(2, kind.target_device)
    link = kind.link(endpoint, pool, 10.0, None)

    def pull() -> None:
        link.pull(pulls_of(range(4)), WHOLE)
        print("pulling", flush=True)
        while True:
            link.pull(pulls_of(range(pool.num_blocks)), WHOLE)

    threading.Thread(target=pull, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    torch.set_num_threads(1)
    role, scheme, argument = sys.argv[1:]
    if role == "source":
        source(scheme, json.loads(argument))
    else:
        target(scheme, argument)
    os._exit(0)
