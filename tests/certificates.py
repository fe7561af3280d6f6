"""Certificates that tests make for themselves, by openssl's command."""

import pathlib
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pair:
    """A certificate and its key, as files."""

    cert: pathlib.Path
    key: pathlib.Path


def authority(folder: pathlib.Path, name: str) -> Pair:
    return _made(folder, name, ["-x509", "-days", "2", "-addext", "basicConstraints=critical,CA:TRUE"])


def signed(folder: pathlib.Path, name: str, by: Pair, *extensions: str, days: int = 1) -> Pair:
    """For localhost and 127.0.0.1, unless `extensions` name others; of -1 days: expired."""
    asked = _made(folder, name, [])
    given = folder / f"{name}.extensions"
    given.write_text(
        "\n".join((*(extensions or ("subjectAltName=DNS:localhost,IP:127.0.0.1",)), "basicConstraints=CA:FALSE"))
    )
    command = ["openssl", "x509", "-req", "-in", str(asked.cert), "-CA", str(by.cert), "-CAkey", str(by.key)]
    command += ["-days", str(days), "-extfile", str(given), "-out", str(asked.cert)]
    subprocess.run(command, check=True, capture_output=True)
    return asked


def _made(folder: pathlib.Path, name: str, options: list[str]) -> Pair:
    pair = Pair(folder / f"{name}.crt", folder / f"{name}.key")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", str(pair.key)]
    command = ["openssl", "req", *key, "-subj", f"/CN={name}", "-out", str(pair.cert), *options]
    subprocess.run(command, check=True, capture_output=True)
    return pair
