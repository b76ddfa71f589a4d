"""How well the traffic covers the experts: tokens per expert, and what stood in where there were few."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..errors import PackError
from ..placement import TrafficTable, stack
from ..placement.traffic import PACK_TABLE
from .expert import ExpertReport
from .manifest import MANIFEST, read_manifest
from .work import Work

EXPERTS: Final = "calibration/experts.json"
COVERAGE: Final = "calibration/coverage.json"
PICTURE: Final = "calibration/coverage.svg"
FORMAT, VERSION = "moefit.coverage", 1
RUNGS: Final = ("natural", "adjacent", "prior", "identity")


@dataclass(frozen=True)
class Coverage:
    """What calibration saw of a pack's layers, or of those of an unfinished one that are done.

    reports: of every expert, layer by layer. table: traffic of the same layers. floor: tokens below which an expert
    also gets those that nearly chose it.
    """

    reports: list[ExpertReport]
    table: TrafficTable
    floor: int
    finished: bool = True

    def to_json(self) -> dict[str, Any]:
        """calibration/coverage.json (docs/pack.md)."""
        table, experts = self.table, self.table.counts.shape[1]
        of_layer = [self.reports[start : start + experts] for start in range(0, len(self.reports), experts)]
        parts = {
            kind: [
                {"name": name, "tokens": tokens[name], **percentiles(counts), "unreached": int((counts == 0).sum())}
                for name, counts in known.items()
            ]
            for kind, known, tokens in (
                ("phases", table.phases, table.phase_tokens),
                ("sources", table.sources, table.source_tokens),
            )
        }
        return {
            "format": FORMAT,
            "version": VERSION,
            "floor": self.floor,
            "tokens": table.tokens,
            "top_k": table.top_k,
            "experts": experts,
            "overall": self._figures(self.reports),
            "layers": [
                {"layer": layer, **self._figures(reports)}
                for layer, reports in zip(table.layers, of_layer, strict=True)
            ],
            **parts,
            "below_floor": [
                {
                    "layer": report.layer,
                    "expert": report.expert,
                    "tokens": report.tokens,
                    "adjacent": report.adjacent,
                    "prior_share": report.prior_share,
                    "rung": rung(report),
                }
                for report in self.reports
                if report.tokens < self.floor
            ],
        }

    def _figures(self, reports: Sequence[ExpertReport]) -> dict[str, Any]:
        served = [rung(report) for report in reports]
        counts = np.array([report.tokens for report in reports])
        return {
            **percentiles(counts),
            "unreached": int((counts == 0).sum()),
            "below_floor": int((counts < self.floor).sum()),
            "rungs": {name: served.count(name) for name in RUNGS},
        }


def percentiles(counts: np.ndarray) -> dict[str, int]:
    """min, p1, p5, p50, p95, max; percentiles are counts that occur, the lower one where two are as near."""
    between = {f"p{p}": int(np.percentile(counts, p, method="lower")) for p in (1, 5, 50, 95)}
    return {"min": int(counts.min()), **between, "max": int(counts.max())}


def rung(report: ExpertReport) -> str:
    """The last rung of the ladder that an expert needed: one of RUNGS, `natural` if its own tokens were enough."""
    if report.identity:
        return "identity"
    if not report.tokens + report.adjacent:
        return "prior"
    return "adjacent" if report.adjacent else "natural"


def pack_coverage(path: Path) -> Coverage:
    """Of a finished pack, of the directory of an unfinished one, or of the --out that a build is working on.

    Raises PackError if it is neither, or no layer is done yet, TraceError for a damaged traffic table.
    """
    if (path / MANIFEST).is_file():
        manifest = read_manifest(path)
        table = TrafficTable.load(path / PACK_TABLE)
        reports = _reports(path / EXPERTS)
        floor, finished = manifest["recipe"].get("enough_tokens", 0), True
    else:
        work, finished = Work(path.with_name(path.resolve().name.removesuffix(".partial"))), False
        try:
            identity = json.loads((work.root / "identity.json").read_bytes())
            floor = identity["recipe"]["enough_tokens"]
            done = work.done_layers()
        except (OSError, ValueError, KeyError):
            mend = "give a pack's directory, or the --out of a build that has begun"
            raise PackError("neither a pack nor an unfinished one", where=str(path), mend=mend) from None
        if not done:
            raise PackError("no layer is done yet", where=str(work.root), mend="wait, or let the build go on")
        reports = [report for layer in done for report in _reports(work.layer_report(layer))]
        table = stack([TrafficTable.load(work.traffic(layer)) for layer in done])
    if [report.tokens for report in reports] != table.counts.ravel().tolist():
        raise PackError(
            "reports and traffic table do not belong together",
            where=str(path),
            found="other tokens per expert",
            mend="restore both files, or build the pack again",
        )
    return Coverage(reports, table, floor, finished)


def _reports(path: Path) -> list[ExpertReport]:
    try:
        return [ExpertReport.from_json(row) for row in json.loads(path.read_bytes())]
    except (OSError, ValueError, TypeError) as error:
        mend = "restore the file, or build the pack again"
        raise PackError("the experts' reports cannot be read", where=str(path), found=str(error), mend=mend) from None
