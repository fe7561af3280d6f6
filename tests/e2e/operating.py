"""The command as an operator has it, on a machine where others may have theirs."""

import os
import pathlib
import subprocess
import sys
import time

END_SECONDS = 20.0


class Operator:
    """A shell with a state folder of its own, by which every process that it caused can be found."""

    def __init__(self, state: pathlib.Path) -> None:
        self.state = state
        self._env = {**os.environ, "HEADRACE_STATE": str(state)}

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "cluster.cli", *arguments],
            env=self._env,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )

    def starts(self, *arguments: str, in_own_group: bool = False) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "cluster.cli", *arguments],
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0 if in_own_group else None,
        )

    def said(self, *arguments: str, stdin: str = "") -> str:
        ran = self.run(*arguments, stdin=stdin)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    def processes(self) -> list[str]:
        """Command lines of all that were started under this state folder and still live."""
        mark = f"HEADRACE_STATE={self.state}".encode()
        found: list[str] = []
        for process in pathlib.Path("/proc").iterdir():
            try:
                if process.name.isdigit() and mark in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue  # ended while we looked, or not ours to look at
        return found

    def left(self) -> list[str]:
        """What is left of these once all had time to end: some of Ray's do when they notice that their raylet did."""
        deadline = time.monotonic() + END_SECONDS
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found
