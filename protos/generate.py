"""Generate the stubs from the .proto file, or check that the committed ones are current.

python -m protos.generate [--check]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent.parent
PROTO = Path("protos/paceline/v1/worker.proto")
STUBS = ("worker_pb2.py", "worker_pb2.pyi", "worker_pb2_grpc.py")


def generate(into: Path) -> None:
    """Write the stubs below ``into``; imports in them start at the repository's root."""
    outputs = [f"--{kind}_out={into}" for kind in ("python", "grpc_python", "pyi")]
    if protoc.main(["protoc", f"-I{ROOT}", *outputs, str(PROTO)]) != 0:
        raise SystemExit(1)


def main() -> int:
    """Generate in place, or with ``--check`` compare."""
    if sys.argv[1:] != ["--check"]:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh, committed = Path(folder) / PROTO.parent, ROOT / PROTO.parent
        stale = [name for name in STUBS if (fresh / name).read_bytes() != (committed / name).read_bytes()]
    if stale:
        sys.stderr.write(f"{', '.join(stale)}: not generated from {PROTO}; run `make protos`\n")
    return bool(stale)


if __name__ == "__main__":
    raise SystemExit(main())
