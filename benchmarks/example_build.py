"""Wall time and peak memory of the whole example build, as a user runs it.

    python benchmarks/example_build.py [--threads 0]

Bounds stated by the project: under 10 minutes on two cores, peak resident memory under 3 GB.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            Path(sys.executable).with_name("moefit"), "build", EXAMPLES / "tiny-v41",
            "--traces", EXAMPLES / "traffic.jsonl", "--eval", EXAMPLES / "eval.jsonl",
            "--gpu", "8MB", "--gpu", "8MB", "--host", "64MB", "--max-kl", "0.12", "--copies", "0",
            "--threads", str(args.threads), "--quiet", "--out", Path(folder) / "pack",
        ]  # fmt: skip
        start = time.monotonic()
        code = subprocess.run([str(word) for word in command], check=False).returncode
        seconds = time.monotonic() - start
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(f"exit code {code}, {seconds:.1f} s (bound 600 s), peak resident memory {peak / 1e9:.2f} GB (bound 3 GB)")
    sys.exit(code or (seconds > 600) or (peak > 3e9))


if __name__ == "__main__":
    main()
