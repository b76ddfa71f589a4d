"""The gate as one object: what to compare with, and how to run it on a pack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..calibrate.checkpoint import Checkpoint
from ..calibrate.families import open_model
from ..packs.build import Examination
from ..parallel import default_threads
from ..progress import Progress
from .gate import Policy
from .receipt import receipt_bytes
from .score import HeldOut, gate, read_held_out, receipt_summary


@dataclass(frozen=True)
class Examiner:
    """A reference, held-out documents and a policy. device: where layers are run."""

    reference: Path
    held_out: HeldOut
    policy: Policy
    threads: int
    device: str = "cpu"

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the receipt's bytes besides reference and pack."""
        return {**self.held_out.identity, "policy": asdict(self.policy)}

    @property
    def tokens(self) -> int:
        """Tokens of all windows."""
        return sum(len(window.ids) for cut in self.held_out.windows.values() for window in cut)

    def run(self, pack: Path, progress: Progress) -> Examination:
        """Gate a pack directory: its receipt, whatever the verdict."""
        receipt = gate(self.reference, pack, self.held_out, self.policy, self.threads, progress, self.device)
        return Examination(receipt_bytes(receipt), receipt_summary(receipt))


def examiner(
    reference: Path, files: Sequence[Path], max_kl: float, threads: int = 0, every: int = 0, device: str = "cpu"
) -> Examiner:
    """Read the held-out files now, so that a bad line is refused before any work.

    threads: 0 takes every CPU. every: only every so many-th document of the files (see `read_held_out`).
    Raises FidelityError or TraceError, and CheckpointError for a reference whose headers are damaged.
    """
    policy = Policy(max_kl)
    held_out = read_held_out(reference, files, every)
    model = open_model(Checkpoint.open(reference))
    for corpus, cut in held_out.windows.items():
        for window in cut:
            model.check_ids(torch.from_numpy(window.ids).long(), where=f"{corpus}, document {window.document}")
    return Examiner(reference, held_out, policy, threads or default_threads(), device)
