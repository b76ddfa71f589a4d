"""Run the original and a pack over held-out documents, teacher-forced, and compare every next-token distribution.

Both are streamed one layer at a time, the pack's experts decoded from its written bytes. Windows are fresh contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..calibrate.checkpoint import Checkpoint, source_identity
from ..calibrate.families import open_model
from ..calibrate.family import Layer, Model, State
from ..calibrate.layout import check_layout
from ..calibrate.stream import Experts, run_layer
from ..calibrate.traces import Window, load_tokenizer, read_documents, split, unused, windows
from ..errors import FidelityError
from ..files import json_bytes, sha256_bytes, sha256_file
from ..packs.reader import Pack
from ..parallel import ordered_map
from ..progress import Progress, Silent
from .divergence import compare
from .gate import Control, Corpus, Policy, negative_control
from .receipt import Protocol, Receipt, make_receipt
from .statistics import WindowRow, window_row

CONTROL_POSITIONS = 64


@dataclass(frozen=True)
class HeldOut:
    """Documents to compare on, by corpus. A line's `corpus` field names it, else its file's name does."""

    windows: dict[str, list[Window]]
    sha256: dict[str, str]  # corpus -> digest of its windows' tokens and documents
    protocol: Protocol

    @property
    def identity(self) -> dict[str, Any]:
        return {"corpora": self.sha256, "window": self.protocol.window_tokens}


def read_held_out(
    model: Path,
    files: Sequence[Path],
    every: int = 0,
    window: int = 512,
    per_document: int = 2,
    shortest: int = 100,
) -> HeldOut:
    """Read held-out JSONL files, or the held-out part of trace sets, with the model's tokenizer and cut them.

    Protocol: windows of `window` tokens from each document's start, at most `per_document`, none under `shortest`.
    every: take only every so many-th document of each file (the ones a recipe's `hold_out` keeps from calibration).
    Raises TraceError for unreadable lines, FidelityError if a corpus is left without a window.
    """
    tokenizer = load_tokenizer(model)
    documents = []
    if len({path.resolve() for path in files}) < len(files):
        raise FidelityError("a held-out file is given twice", found=", ".join(map(str, files)), mend="give each once")
    taken: set[str] = set()
    for path in files:
        read = read_documents(path, tokenizer, part="held-out")
        chosen = split(read, every)[1] if every else read
        for document in chosen:  # ids are unique within a file; a corpus may span several
            documents.append((document.corpus or path.stem, replace(document, id=unused(document.id, taken))))
    if not documents:
        raise FidelityError("there is nothing to compare on", mend="give at least one --eval file")
    cut: dict[str, list[Window]] = {}
    for corpus in sorted({corpus for corpus, _ in documents}):
        cut[corpus] = windows([d for c, d in documents if c == corpus], window, per_document, shortest)
    digests = {
        corpus: sha256_bytes(json_bytes([[w.document, w.ids.tolist()] for w in ws])) for corpus, ws in cut.items()
    }
    words = "[bos] + encode(text); messages through the model's chat template"
    return HeldOut(cut, digests, Protocol(window, per_document, shortest, "float32", words))


def final_states(
    model: Model,
    experts: Callable[[Layer], Experts],
    ids: Sequence[torch.Tensor],
    threads: int,
    progress: Progress,
    note: str,
) -> list[State]:
    """States after the last layer of every window. experts: of a layer, the original's or a pack's."""
    states = [model.embed(window) for window in ids]
    for index in range(model.layers):
        layer = model.load_layer(index)
        run_layer(layer, states, ids, experts(layer), threads)
        progress.advance(1, note)
    return states


def score(
    reference: Path,
    candidate: Path,
    held_out: HeldOut,
    threads: int,
    progress: Progress | None = None,
    device: str = "cpu",
) -> dict[str, Corpus]:
    """Every corpus as measured: KL(reference || candidate) and top-1 of each window, and the negative control.

    reference: original checkpoint. candidate: pack directory, finished or not. Memory: the states of all windows,
    twice, one layer, and one window's logits per thread. device: where layers are run.
    Raises FidelityError if the two have other vocabularies or layers.
    """
    progress = progress or Silent()
    source = Checkpoint.open(reference)
    layout, pack = check_layout(source), Pack(candidate)
    original, decoded = open_model(source, device=device), pack.model(device)
    compared = {"architectures": (source.config["architectures"], pack.source.config["architectures"])}
    for size in ("vocabulary", "layers", "hidden", "experts"):
        compared[size] = (getattr(layout, size), getattr(pack.layout, size))
    for field, (ours, theirs) in compared.items():
        if ours != theirs:
            raise FidelityError(
                "pack and original are different models", where=f"{pack.path}, {field}",
                found=f"original has {ours}, pack has {theirs}", mend="compare a pack with what it was built from",
            )  # fmt: skip
    order = [(corpus, window) for corpus, cut in held_out.windows.items() for window in cut]
    ids = [torch.from_numpy(window.ids).long() for _, window in order]
    progress.stage("gate", 2 * original.layers + len(order), "steps")
    before = final_states(original, lambda layer: layer.expert, ids, threads, progress, "original")
    after = final_states(decoded, lambda layer: pack.experts(layer, device), ids, threads, progress, "pack")

    def rows(index: int) -> tuple[WindowRow, Control | None]:
        corpus, window = order[index]
        first = index == 0 or order[index - 1][0] != corpus
        where = f"{corpus}/{window.document}"
        ours, theirs = original.logits(before[index]).cpu(), decoded.logits(after[index]).cpu()
        control = negative_control(ours[:CONTROL_POSITIONS], window=where) if first else None
        return window_row(window.document, compare(ours, theirs, ids[index], window=where)), control

    measured: dict[str, list[WindowRow]] = {corpus: [] for corpus in held_out.windows}
    controls: dict[str, Control] = {}
    for (corpus, _), (row, control) in zip(order, ordered_map(rows, range(len(order)), threads), strict=True):
        measured[corpus].append(row)
        if control is not None:
            controls[corpus] = control
        progress.advance(1, corpus)
    progress.finish()
    return {corpus: Corpus(held_out.sha256[corpus], tuple(rows), controls[corpus]) for corpus, rows in measured.items()}


def gate(
    reference: Path,
    candidate: Path,
    held_out: HeldOut,
    policy: Policy,
    threads: int,
    progress: Progress | None = None,
    device: str = "cpu",
) -> Receipt:
    """Score and judge. The receipt names reference and candidate by `source_identity`, which samples each shard."""
    corpora = score(reference, candidate, held_out, threads, progress, device)
    inputs = {
        "reference": sha256_bytes(json_bytes(source_identity(Checkpoint.open(reference)))),
        "candidate": sha256_bytes(json_bytes(source_identity(Pack(candidate).checkpoint))),
        "tokenizer": sha256_file(reference / "tokenizer.json"),
    }
    return make_receipt(held_out.protocol, inputs, policy, corpora)


def receipt_summary(receipt: Receipt) -> dict[str, Any]:
    """What a manifest and a one-screen summary show of a receipt."""
    corpora = {}
    for name, summary in receipt.verdict.summaries.items():
        corpora[name] = {
            "kl": summary.kl.value,
            "kl_interval": [summary.kl.low, summary.kl.high],
            "top1": summary.top1.value,
            "top1_interval": [summary.top1.low, summary.top1.high],
            "documents": summary.kl.documents,
            "outcome": receipt.verdict.corpus(name).value,
        }
    limit = receipt.policy.max_kl
    return {
        "outcome": receipt.verdict.outcome.value,
        "max_kl": limit if isinstance(limit, float | int) else dict(limit),
        "corpora": corpora,
    }
