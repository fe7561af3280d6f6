"""Generates the protocol's Python code from proto/headrace/v1/*.proto; `--check` compares instead of writing."""

import argparse
import filecmp
import pathlib
import sys
import tempfile

import grpc_tools
from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parent.parent / "proto"


def generate(target: pathlib.Path) -> list[pathlib.Path]:
    """Writes the code for every .proto below `target`, and returns the files made, relative to it."""
    protos = sorted(str(path) for path in (ROOT / "headrace" / "v1").glob("*.proto"))
    include = pathlib.Path(grpc_tools.__file__).parent / "_proto"
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    if protoc.main(["protoc", f"-I{ROOT}", f"-I{include}", *outputs, *protos]):
        raise SystemExit("protoc failed")
    made = [path for path in target.rglob("*_pb2*.py*") if path.suffix in (".py", ".pyi")]
    return sorted(path.relative_to(target) for path in made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 when the checked-in code differs")
    if not parser.parse_args().check:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as folder:
        fresh = pathlib.Path(folder)
        stale = [
            str(name)
            for name in generate(fresh)
            if not (ROOT / name).exists() or not filecmp.cmp(fresh / name, ROOT / name, shallow=False)
        ]
    if stale:
        sys.exit(f"generated code is out of date: {', '.join(stale)}; run `make protocol`")


if __name__ == "__main__":
    main()
