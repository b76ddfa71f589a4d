"""KL(original || pack) of the experts at three bits, recipe against recipe, on the two tiny models. Needs ../shared.

    python benchmarks/quality.py [--model tiny-qwen3-moe tiny-v41] [--seeds 3] [--device cuda] [--cache DIR]

One table per model: mean KL over the corpora with its 95 % interval over windows, KL of each corpus, the ratio to
exllamav3's recipe (paired by window, seeds averaged) and top-1 agreement. Every weight that is scored was decoded from
packed bytes. All rows are calibrated on the same traffic; docs/quality.md says what the rows are and what was tried.
On an H200 with ten copies and three seeds: the statistics of the traffic 100 s (tiny-qwen3-moe) and 550 s (tiny-v41)
for either half, the rows 130 s and 260 s with --ablations. --cache keeps the statistics.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from quality_baselines import gptq, rtn
from quality_models import Weights, load_model
from quality_score import SHARED, Measured, Rows, Scorer, calibration_windows, evaluation, paired, summary
from quality_statistics import PROJECTIONS, cached, factor_sums, gather_factors, gather_hessians
from torch import Tensor

from moefit.parallel import default_threads, ordered_map
from moefit.quantize.allocate import Allocation, Choice, allocate, hedged, predicted_kl
from moefit.quantize.kronecker import FactorSums, Regularization, choose_regularization, shrink
from moefit.quantize.ldlq import energy
from moefit.quantize.linear import Linear, Options, decode, quantize_linears, stored_layout

OURS = Options(bits=3)
BITS = (2.0, 2.5, 3.0, 3.5, 4.0)
RECIPE = "EXL3, exllamav3's recipe"


@dataclass(frozen=True)
class Factors:
    """hin [E, k, k], hout [E, n, n]: shrunk. chosen: how, and the damping. sums: both halves of the traffic."""

    hin: Tensor
    hout: Tensor
    chosen: Regularization
    sums: FactorSums


@dataclass(frozen=True)
class Encoded:
    """All experts of a layer's projection at one K. weight: decoded [E, k, n]. kl: predicted [E], None one-sided."""

    weight: Tensor
    kl: Tensor | None


Given = Callable[[int, str], "Factors | Tensor | None"]
"""(layer, projection) -> both factors, or Hin [E or 1, k, k] alone, or nothing."""


def decoded(linears: dict[str, Linear], like: Tensor) -> Tensor:
    """[E, k, n] from the packed bytes."""
    return torch.stack([decode(q.trellis, q.suh, q.svh, q.codebook) for q in linears.values()]).to(like.device)


class Bench:
    """One model, its traffic's statistics, and its scorer."""

    def __init__(self, path: Path, args: argparse.Namespace) -> None:
        self.model, self.copies, cache = load_model(path, args.device), args.copies, args.cache
        files = [args.shared / "traffic" / f"traffic_{part}.jsonl" for part in ("calib", "plan")]
        windows = calibration_windows(path, files)[:: args.every]
        self.traffic = len(windows), sum(map(len, windows))
        self.scorer = Scorer(self.model, evaluation(path, args.shared / "eval"))
        key = (self.model.name, *self.traffic)
        self.hessians = cached(cache, ("hessians", *key), lambda: gather_hessians(self.model, windows, say))
        self.stored = {
            n: cached(cache, ("factors", *key, n, 0), lambda n=n: gather_factors(self.model, windows, n, 0, say))
            for n in sorted({0, self.copies})
        }
        self.chosen: dict[tuple[int, str, int], Regularization] = {}

    def places(self) -> list[tuple[int, str]]:
        return [(layer, projection) for layer in range(self.model.layers) for projection in PROJECTIONS]

    def input_hessian(self, layer: int, projection: str, kind: str) -> Tensor:
        """kind: "recipe" (all tokens, shared by gate and up) or "routed" (each expert's own tokens)."""
        if kind == "recipe":
            name = f"{layer}.down.all" if projection == "down" else f"{layer}.input"
        else:
            name = f"{layer}.down.routed" if projection == "down" else f"{layer}.input.routed"
        hessian = self.hessians[name].to(self.model.device)
        return hessian if hessian.ndim == 3 else hessian[None]

    def factors(self, layer: int, projection: str, copies: int | None = None) -> Factors:
        """Shrunk Hin and Hout of all experts, the damping that goes with them, and the sums they come from."""
        copies = self.copies if copies is None else copies
        first, second = factor_sums(self.model, self.stored[copies], layer, projection)
        key = layer, projection, copies
        if key not in self.chosen:
            self.chosen[key] = choose_regularization(first, second)
        chosen, sums = self.chosen[key], first + second
        return Factors(*sums.factors(chosen.shrink_in, chosen.shrink_out), chosen, sums)

    def encode(self, given: Given, options: Options) -> dict[tuple[int, str], Encoded]:
        """Quantize every expert, pack, decode from the packed bytes."""

        def one(place: tuple[int, str]) -> Encoded:
            original = self.model.original(place[0])[place[1]]  # [E, k, n]
            told = given(*place)
            weights = {f"{place}.{expert}": w for expert, w in enumerate(original)}
            if not isinstance(told, Factors):
                return Encoded(decoded(quantize_linears(weights, told, None, options), original), None)
            damped = replace(options, damping=told.chosen.damping_in, output_damping=told.chosen.damping_out)
            weight = decoded(quantize_linears(weights, told.hin, told.hout, damped), original)
            error = energy(original - weight, told.hin, told.hout)
            tokens = int(self.stored[self.copies]["tokens"])
            return Encoded(weight, predicted_kl(error, told.sums.trace, *original.shape[1:], tokens))

        threads = default_threads() if self.model.device.type == "cpu" else 1
        places = self.places()
        return dict(zip(places, ordered_map(one, places, threads), strict=True))

    def score(self, encoded: dict[tuple[int, str], Tensor]) -> Rows:
        weights: list[Weights] = [{p: encoded[layer, p] for p in PROJECTIONS} for layer in range(self.model.layers)]
        return self.scorer.score(weights)

    def nbytes(self, projection: str, bits: float) -> int:
        """Stored bytes of one expert's projection."""
        k, n = self.model.original(0)[projection].shape[1:]
        return sum(size for _, _, size in stored_layout(k, n, bits, "mul1").values())


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def baselines(bench: Bench) -> Iterator[tuple[str, Rows]]:
    """Rows without a seed."""
    weights = {place: bench.model.original(place[0])[place[1]] for place in bench.places()}
    yield "round-to-nearest, group 128", bench.score({place: rtn(w) for place, w in weights.items()})
    hessians = {place: bench.input_hessian(*place, "routed") for place in weights}
    yield "GPTQ, group 128, routed Hessians", bench.score({p: gptq(w, hessians[p]) for p, w in weights.items()})


def uniform(bench: Bench, seed: int, ablations: bool) -> Iterator[tuple[str, Rows]]:
    """EXL3 rows of three bits everywhere, except the last of ours (`allocated`)."""

    def row(given: Given, options: Options) -> Rows:
        encoded = bench.encode(given, replace(options, seed=seed))
        return bench.score({place: e.weight for place, e in encoded.items()})

    theirs = replace(OURS, damping=0.025)
    yield "EXL3, identity Hessian", row(lambda layer, p: None, theirs)
    yield RECIPE, row(lambda layer, p: bench.input_hessian(layer, p, "recipe"), theirs)
    if not ablations:
        return

    def routed(layer: int, projection: str) -> Tensor:
        own = bench.input_hessian(layer, projection, "routed")
        tokens = bench.factors(layer, projection, 0).sums.tokens
        return shrink(own, own.sum(0, keepdim=True), tokens / (tokens + 1000.0))

    yield "one-sided, routed, shrunk", row(routed, OURS)
    yield "two-sided, traffic only", row(lambda layer, p: bench.factors(layer, p, 0), OURS)
    yield "two-sided, no refit", row(bench.factors, replace(OURS, refit=0))


def allocated(bench: Bench, seed: int) -> Iterator[tuple[str, Rows, float, str]]:
    """Ours at three bits everywhere, and with bits by projection and by expert in the same bytes.

    Yields name, rows, predicted KL, and how the bits were spent.
    """
    at = {bits: bench.encode(bench.factors, replace(OURS, bits=bits, seed=seed)) for bits in BITS}
    places, experts = bench.places(), range(bench.model.experts)
    plain = sum(float(e.kl.sum()) for e in at[3.0].values())
    yield "moefit", bench.score({place: e.weight for place, e in at[3.0].items()}), plain, "3 everywhere"
    budget = sum(bench.nbytes(p, 3.0) for _, p in places) * bench.model.experts
    by_projection = allocate(
        {
            (layer, p): [
                Choice(b, bench.nbytes(p, b) * bench.model.experts, float(at[b][layer, p].kl.sum())) for b in BITS
            ]
            for layer, p in places
        },
        budget,
    )
    chosen = {place: at[by_projection.bits[place]][place].weight for place in places}
    yield "moefit, bits by projection", bench.score(chosen), by_projection.kl, spent(by_projection)
    weighed = {(b, place): hedged(at[b][place].kl).tolist() for b in BITS for place in places}
    by_expert = allocate(
        {
            (layer, p, e): [Choice(b, bench.nbytes(p, b), weighed[b, (layer, p)][e]) for b in BITS]
            for layer, p in places
            for e in experts
        },
        budget,
    )
    mixed = {
        (layer, p): torch.stack([at[by_expert.bits[layer, p, e]][layer, p].weight[e] for e in experts])
        for layer, p in places
    }
    predicted = sum(float(at[b][layer, p].kl[e]) for (layer, p, e), b in by_expert.bits.items())  # not hedged
    yield "moefit, bits by expert", bench.score(mixed), predicted, spent(by_expert)


def spent(allocation: Allocation) -> str:
    """ "2: 12 %, 2.5: ..." of the groups."""
    values = list(allocation.bits.values())
    return ", ".join(f"{b:g}: {100 * values.count(b) / len(values):.0f} %" for b in BITS)


def show(measured: Measured) -> str:
    mean = measured.mean
    corpora = " ".join(f"{i.value:.4f}" for i in measured.corpora.values())
    return f"{mean.value:.4f} [{mean.low:.4f}, {mean.high:.4f}]  {corpora}"


def run(path: Path, args: argparse.Namespace) -> None:
    start = time.perf_counter()
    bench = Bench(path, args)
    say(f"{path.name}: statistics after {time.perf_counter() - start:.0f} s")
    rows: dict[str, list[Rows]] = {name: [row] for name, row in baselines(bench)}
    notes: dict[str, str] = {}
    for seed in range(args.seeds):
        for name, row in uniform(bench, seed, args.ablations):
            rows.setdefault(name, []).append(row)
        for name, row, predicted, how in allocated(bench, seed):
            rows.setdefault(name, []).append(row)
            notes[name] = f"predicted {predicted:.4f}; {how}"
        say(f"{path.name}: seed {seed} after {time.perf_counter() - start:.0f} s")
    names = list(next(iter(rows.values()))[0])
    print(f"\n{path.name}: {bench.traffic[1]:,} tokens of traffic, {args.copies} resampled copies, {args.seeds} seeds")
    print(f"{'':34} mean KL [95 %]            {' '.join(f'{c:7}' for c in names)}  ratio to exllamav3's    top-1")
    for name, runs in rows.items():
        kl, top1 = summary(runs)
        ratio = paired(rows[RECIPE], runs)
        worst = max(interval.value for interval in ratio.corpora.values())
        r = ratio.mean
        print(
            f"{name:34} {show(kl)}  {r.value:.3f} [{r.low:.3f}, {r.high:.3f}] worst {worst:.3f}  "
            f"{' '.join(f'{i.value:.3f}' for i in top1.corpora.values())}  {notes.get(name, '')}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["tiny-qwen3-moe", "tiny-v41"])
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--copies", type=int, default=10, help="resampled copies of the traffic for the factors")
    parser.add_argument("--every", type=int, default=1, help="calibrate on every n-th window only")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cache", type=Path, help="folder that keeps the statistics between runs")
    parser.add_argument("--ablations", action="store_true", help="rows between exllamav3's recipe and ours")
    args = parser.parse_args()
    for name in args.model:
        run(args.shared / "models" / name, args)


if __name__ == "__main__":
    main()
