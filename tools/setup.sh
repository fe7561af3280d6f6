#!/usr/bin/env bash
# Makes the virtual environment named (default .venv), with PYTHON (default python3): torch first, from where
# pip is told to look, so that nothing else pulls another build of it. Everything is pinned by constraints.txt, what builds this package included.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
python=${PYTHON:-python3}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    found=$("$python" --version 2>/dev/null || true)
    echo "setup: Python 3.11 or newer is needed, $python is ${found:-not there}. Name another: make setup PYTHON=python3.12" >&2
    exit 1
fi
if [ -x "$venv/bin/python" ] && ! "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "setup: $venv was made with $("$venv/bin/python" --version), Python 3.11 or newer is needed: remove it first" >&2
    exit 1
fi

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
echo "setup: installs into $(realpath "$venv"); a minute where the network is quick" >&2
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv torch
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" \
    --constraint constraints.txt --build-constraint constraints.txt --editable ".[dev]"
"$venv/bin/python" tools/torch_build.py >&2
echo "setup: done; . $(realpath --relative-to=. "$venv")/bin/activate puts headrace on the path" >&2
