#!/usr/bin/env bash
# Makes the virtual environment named (default .venv): torch first, so that nothing else pulls a CUDA build of it.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check uv
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "torch==2.13.0"
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --constraint constraints.txt --editable ".[dev]"
