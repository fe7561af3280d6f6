"""A rank as a child process: `python -m workers.ranks.process ADDRESS RANK`, the token in HEADRACE_RANK_TOKEN."""

import logging
import os
import signal
import sys

from headrace.errors import HeadraceError
from workers.ranks.rank import rank_main

TOKEN_VARIABLE = "HEADRACE_RANK_TOKEN"


def main() -> None:
    """Ends with the process: a thread that is stuck in a collective, whose peers are gone, keeps nothing alive."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; rank 0 decides
    code = 0
    try:
        rank_main(sys.argv[1], os.environ.pop(TOKEN_VARIABLE), int(sys.argv[2]))
    except HeadraceError as error:
        logging.getLogger(__name__).warning("%s", error.message)
        code = 1
    except BaseException:
        logging.getLogger(__name__).exception("rank process failed")
        code = 2
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
