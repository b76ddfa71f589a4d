"""Peak memory of a build's calibration, with 10 and 40 layers and with 1 and 4 times the traffic.

    python benchmarks/calibrate_memory.py [--layers 10 40] [--tokens 2048] [--hidden 256] [--experts 32] [--threads 2]

Random narrow DeepSeek-V4.1 checkpoints that differ in their number of layers alone. Stages, each in a process of its
own and on two or more groups of windows: the forward of a one-sided build; a two-sided build's pass forward and back;
and what its quantizer takes from that pass, layer by layer: factors of all experts, and adjacent tokens' inputs.
Rounding itself is left out: its memory is that of the experts at work, and of the trellis encoder's three workspaces
per thread (some 100 MB), each made when a tile first needs it, sooner or later.
Peak is the process's largest resident set; mapped is the part of it that lies in files (the kernel takes these pages
back when it needs them), anonymous the rest. Both are of the whole process, with some 280 MB of Python and torch; what
torch takes with nothing to do is shown too. Bounds: 10 % more for 4 times the layers, which is the project's; 20 % more
of what is not mapped for 4 times the traffic, of which ids and places (some 100 bytes per token and pass) stay.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the tests' maker of checkpoints

from moefit.calibrate import passes as passes_module  # noqa: E402
from moefit.calibrate.borders import forward_borders, open_borders  # noqa: E402
from moefit.calibrate.checkpoint import Checkpoint  # noqa: E402
from moefit.calibrate.families import open_model  # noqa: E402
from moefit.calibrate.passes import LayerTraffic, run_passes  # noqa: E402
from moefit.memory import give_back_freed  # noqa: E402
from moefit.packs.factors import layer_factors  # noqa: E402
from moefit.progress import Silent  # noqa: E402
from tests.calibrate.synthetic import random_v41  # noqa: E402

BOUND, BOUND_TRAFFIC = 1.10, 1.20
WINDOW = 256
STAGES = ("nothing", "forward", "backward", "factors")


def checkpoint(folder: Path, layers: int, hidden: int, experts: int) -> Path:
    """Every kind of layer stands among the first five, whatever their number."""
    return random_v41(
        folder,
        ROOT / "examples" / "tiny-v41",
        hidden_size=hidden,
        moe_intermediate_size=hidden // 2,
        n_routed_experts=experts,
        num_experts_per_tok=4,
        num_hidden_layers=layers,
        compress_ratios=[0, 2, 2, *[1] * (layers - 3)],
        index_source_layer_ids=[1, 3, 4],
        engram_layer_ids=[1],
        engram_num_embeddings=[384],
    )


def work(stage: str, model_folder: Path, folder: Path, tokens: int, threads: int) -> None:
    """One stage, in a process of its own. Groups are of half the shorter traffic."""
    torch.set_num_threads(1)
    give_back_freed()
    model = open_model(Checkpoint.open(model_folder))
    generator = torch.Generator().manual_seed(0)
    windows: list[Tensor] = [torch.randint(16, 4000, (WINDOW,), generator=generator) for _ in range(tokens // WINDOW)]
    group = 4 * WINDOW
    passes_module.forward_borders = partial(forward_borders, group_tokens=group)  # type: ignore[assignment]
    passes_module.open_borders = partial(open_borders, group_tokens=group)  # type: ignore[assignment]
    if stage == "forward":
        run_passes(model, windows, folder / "one-sided", None, threads, Silent())
    elif stage in ("backward", "factors"):
        passes = run_passes(model, windows, folder / "two-sided", 0, threads, Silent())  # the second time: opened
        for index in range(model.layers if stage == "factors" else 0):
            traffic = LayerTraffic(model.load_layer(index), passes)
            layer_factors(traffic, threads)
            for tokens_near in traffic.adjacent(1000, threads).values():
                traffic.inputs(tokens_near)


def measured(stage: str, model: Path, folder: Path, tokens: int, threads: int) -> tuple[float, float]:
    """(peak resident set, largest anonymous part) in MB of a fresh process."""
    words = [stage, str(model), str(folder), str(tokens), str(threads)]
    child = subprocess.Popen([sys.executable, __file__, "--work", *words])
    peak = anonymous = 0
    while child.poll() is None:
        try:
            lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            break
        pairs = (line.partition(":") for line in lines if line.endswith(" kB"))
        sizes = {key: int(value.split()[0]) for key, _, value in pairs}
        peak, anonymous = max(peak, sizes.get("VmHWM", 0)), max(anonymous, sizes.get("RssAnon", 0))
        time.sleep(0.004)
    if child.wait():
        raise SystemExit(f"{stage} failed")
    return peak * 1024 / 1e6, anonymous * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs=2, default=[10, 40])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        stage, model, folder, tokens, threads = args.work
        work(stage, Path(model), Path(folder), int(tokens), int(threads))
        return
    few, many = args.layers
    cases = {"few": (few, args.tokens), "many": (many, args.tokens), "long": (few, 4 * args.tokens)}
    found: dict[tuple[str, str], tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as root:
        models = {n: checkpoint(Path(root) / f"{n}", n, args.hidden, args.experts) for n in args.layers}
        for case, (layers, tokens) in cases.items():
            for stage in STAGES:
                start = time.monotonic()
                sizes = found[case, stage] = measured(stage, models[layers], Path(root) / case, tokens, args.threads)
                print(
                    f"{stage:9} {layers:3} layers {tokens:6,} tokens: peak {sizes[0]:7.1f} MB, anonymous "
                    f"{sizes[1]:7.1f} MB  ({time.monotonic() - start:.0f} s)",
                    flush=True,
                )
    for stage in STAGES[1:]:
        layers = found["many", stage][0] / found["few", stage][0]
        length = found["long", stage][1] / found["few", stage][1]
        held = "holds" if layers <= BOUND and length <= BOUND_TRAFFIC else "BROKEN"
        print(
            f"{stage:9} {many}/{few} layers: {layers:.3f} of the peak, bound {BOUND:.2f}; 4 x the tokens: {length:.3f} "
            f"of what is not mapped, bound {BOUND_TRAFFIC:.2f}: {held}"
        )


if __name__ == "__main__":
    main()
