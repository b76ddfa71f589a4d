"""What a pack says of its traffic: routing of every token, phases and sources, coverage as numbers and as a picture."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from moefit.calibrate.render import Span
from moefit.calibrate.traces import Document, Window, windows
from moefit.errors import MoefitError
from moefit.files import write_json
from moefit.packs.coverage import Coverage, pack_coverage, percentiles, rung
from moefit.packs.coverage_picture import figure, picture
from moefit.packs.expert import ExpertReport
from moefit.packs.routing import MAX_SOURCES, label_tokens, pack_recorded
from moefit.packs.verify import verify
from moefit.packs.work import Work
from moefit.placement import TokenLabels, TrafficTable
from moefit.placement.recorded import table as recorded_table

from ..small_model import ONE_SIDED, RECIPE, Built, Inputs, digests
from .test_build import captures

LAYER, TOKENS = "calibration/routing/layer-{:03d}.safetensors", "calibration/routing/tokens.safetensors"


def report(layer: int, expert: int, tokens: int, adjacent: int = 0, identity: tuple[str, ...] = ()) -> ExpertReport:
    return ExpertReport(layer, expert, tokens, adjacent, 0.5, 0.0, 0.5, {}, {}, [], {}, list(identity))


def window(size: int, source: str, generated: list[int] | None = None) -> Window:
    written = None if generated is None else np.isin(np.arange(size), generated)
    return Window(np.arange(size, dtype=np.int32), "d", source, generated=written)


# Phases and sources


def test_tokens_that_the_model_wrote_are_decode() -> None:
    """By role; windows cut through the spans."""
    roles = [("template", 2), ("user", 3), ("template", 1), ("reasoning", 2), ("assistant", 3), ("tool_call", 2),
             ("tool", 4), ("text", 1)]  # fmt: skip
    spans, start = [], 0
    for role, length in roles:
        spans.append(Span(role, start, start + length))
        start += length
    document = Document("d", "s", "", np.arange(start, dtype=np.int32), roles=tuple(spans))
    cut = windows([document, Document("e", "s", "", np.arange(3, dtype=np.int32))], 5)
    assert [None if w.generated is None else np.flatnonzero(w.generated).tolist() for w in cut] == [
        [], [1, 2, 3, 4], [0, 1, 2], [], None,
    ]  # fmt: skip
    labels = label_tokens(cut)
    assert np.flatnonzero(labels.phase).tolist() == list(range(6, 13))  # 1: decode
    assert labels.phase.size == 21 and set(labels.phase.tolist()) == {0, 1}


def test_sources_of_most_tokens_are_told_apart() -> None:
    many = [window(2 + n, f"log-{n:02d}") for n in range(MAX_SOURCES + 3)]
    labels = label_tokens([*many, window(500, ""), window(9, "b"), window(60, "a"), window(51, "b")])
    assert len(labels.sources) == MAX_SOURCES
    assert labels.sources[:3] == ("a", "b", "log-05")  # by name; the five smallest logs are left out
    sizes = np.bincount(labels.source[labels.source >= 0])
    assert sizes[:3].tolist() == [60, 60, 7]
    assert (labels.source < 0).sum() == 500 + sum(range(2, 7))


def test_routing_of_every_token_is_in_the_pack(small_pack: Built) -> None:
    """The ids and weights of the forward, computed again; ids exact, weights as float16."""
    for layer, capture in enumerate(captures(small_pack.inputs, RECIPE)):
        found = load_file(small_pack.path / LAYER.format(layer))
        assert {name: tensor.dtype for name, tensor in found.items()} == {
            "topk_ids": torch.uint16,
            "topk_weights": torch.float16,
        }
        assert torch.equal(found["topk_ids"].long(), capture.topk_ids)
        assert torch.equal(found["topk_weights"], capture.topk_weights.half())
        bounds = capture.bounds
    tokens = load_file(small_pack.path / TOKENS)
    assert tokens["starts"].tolist() == bounds
    assert tokens["phase"].tolist() == tokens["source"].tolist() == [0] * bounds[-1]  # JSON lines of one source
    assert tokens["document"].tolist() == sorted(tokens["document"].tolist())
    table = TrafficTable.load(small_pack.path / "calibration/traffic.safetensors")
    found = pack_recorded(small_pack.path)
    assert found is not None
    assert found.conversations == int(tokens["document"][-1]) + 1 == small_pack.manifest["calibration"]["documents"]
    assert recorded_table(found) == table
    assert table.windows.keys() == set(range(1, 9))
    assert table.phase_tokens == {"prefill": table.tokens}
    assert table.source_tokens == {"moefit examples": table.tokens}
    assert small_pack.manifest["files"].keys() >= {
        *(LAYER.format(layer) for layer in range(6)), TOKENS, "calibration/coverage.json", "calibration/coverage.svg",
    }  # fmt: skip


def test_routing_can_be_left_out(mini: Inputs, mini_pack: Built, tmp_path: Path) -> None:
    mini.build(tmp_path / "pack", gate=False, recipe=replace(ONE_SIDED, keep_routing=False))
    assert verify(tmp_path / "pack", quick=True).problems == []
    ours, theirs = digests(mini_pack.path), digests(tmp_path / "pack")
    assert {name for name in ours.keys() - theirs.keys() if "routing" in name} == {
        *(LAYER.format(layer) for layer in range(3)), TOKENS,
    }  # fmt: skip
    name = "calibration/traffic.safetensors"
    assert ours[name] == theirs[name]


# The report


def test_the_last_rung_that_an_expert_needed() -> None:
    assert rung(report(0, 0, 9)) == "natural"
    assert rung(report(0, 0, 9, 1)) == rung(report(0, 0, 0, 1)) == "adjacent"
    assert rung(report(0, 0, 0)) == "prior"
    assert rung(report(0, 0, 0, 0, ("w2",))) == rung(report(0, 0, 9, 0, ("w1",))) == "identity"


def test_percentiles_are_counts_that_occur() -> None:
    assert percentiles(np.arange(100, 0, -1)) == {"min": 1, "p1": 1, "p5": 5, "p50": 50, "p95": 95, "max": 100}
    assert percentiles(np.array([7])) == dict.fromkeys(("min", "p1", "p5", "p50", "p95", "max"), 7)


def small_coverage() -> Coverage:
    ids = {layer: np.array([[0, 1], [1, 2], [1, 0], [0, 1]]) for layer in (2, 5)}
    labels = TokenLabels(np.array([0, 1, 1, 0]), np.array([0, 0, 0, -1]), ("web",))
    table = TrafficTable.from_topk(ids, 4, labels)
    reports = [
        report(layer, expert, tokens, adjacent)
        for layer in (2, 5)
        for expert, (tokens, adjacent) in enumerate([(3, 0), (4, 0), (1, 2), (0, 0)])
    ]
    return Coverage(reports, table, 3)


def test_the_report_counts_what_the_table_holds() -> None:
    found = small_coverage().to_json()
    assert (found["floor"], found["tokens"], found["experts"], found["top_k"]) == (3, 4, 4, 2)
    layer = {"min": 0, "p1": 0, "p5": 0, "p50": 1, "p95": 3, "max": 4, "unreached": 1, "below_floor": 2}
    rungs = {"natural": 2, "adjacent": 1, "prior": 1, "identity": 0}
    assert found["layers"] == [{"layer": number, **layer, "rungs": rungs} for number in (2, 5)]
    assert found["overall"]["below_floor"] == 4 and found["overall"]["rungs"]["natural"] == 4
    assert [(row["layer"], row["expert"], row["rung"]) for row in found["below_floor"]] == [
        (2, 2, "adjacent"), (2, 3, "prior"), (5, 2, "adjacent"), (5, 3, "prior"),
    ]  # fmt: skip
    assert [(row["name"], row["tokens"], row["max"], row["unreached"]) for row in found["phases"]] == [
        ("prefill", 2, 2, 4), ("decode", 2, 2, 2),
    ]  # fmt: skip
    assert [(row["name"], row["tokens"], row["max"]) for row in found["sources"]] == [("web", 3, 3)]


def test_a_pack_s_report_is_of_its_experts(small_pack: Built) -> None:
    written = json.loads((small_pack.path / "calibration/coverage.json").read_bytes())
    found = pack_coverage(small_pack.path)
    assert found.to_json() == written
    manifest = small_pack.manifest["calibration"]
    assert {key: manifest["coverage"][key] for key in ("min", "p50", "max", "unreached")} == {
        key: written["overall"][key] for key in ("min", "p50", "max", "unreached")
    }
    below = [(r.layer, r.expert) for r in found.reports if r.tokens < RECIPE.enough_tokens]
    assert [(row["layer"], row["expert"]) for row in written["below_floor"]] == below != []
    assert written["overall"]["rungs"] == {
        "natural": 18 - len(below), "adjacent": len(below), "prior": 0, "identity": 0,
    }  # fmt: skip
    drawn = picture(found.table, found.floor)
    assert (small_pack.path / "calibration/coverage.svg").read_text() == drawn


def test_an_unfinished_build_shows_the_layers_that_are_done(mini_pack: Built, tmp_path: Path) -> None:
    finished = pack_coverage(mini_pack.path)
    work = Work(tmp_path / "pack")
    work.folder.mkdir(parents=True)
    write_json(work.root / "identity.json", {"recipe": mini_pack.manifest["recipe"]})
    for path in (work.out, work.root):
        with pytest.raises(MoefitError, match="no layer is done yet"):
            pack_coverage(path)
    table = finished.table
    for row, layer in enumerate(table.layers[:2]):
        parts = [part[row : row + 1] for part in (table.counts, *table.phases.values())]
        sources = {name: counts[row : row + 1] for name, counts in table.sources.items()}
        one = TrafficTable(parts[0], table.tokens, (layer,), table.top_k, parts[1], sources=sources)
        one.save(work.traffic(layer))
        write_json(work.layer_report(layer), [vars(r) for r in finished.reports if r.layer == layer])
    for path in (work.out, work.root):
        found = pack_coverage(path)
        assert not found.finished
        assert found.to_json()["layers"] == finished.to_json()["layers"][:2]
    work.traffic(1).write_bytes(work.traffic(0).read_bytes())
    with pytest.raises(MoefitError):
        pack_coverage(work.out)


def test_what_is_no_pack_has_no_coverage(mini_pack: Built, tmp_path: Path) -> None:
    with pytest.raises(MoefitError, match="neither a pack nor an unfinished one"):
        pack_coverage(tmp_path)
    pack = mini_pack.copy(tmp_path)
    shutil.copy(pack / "calibration/experts.json", tmp_path)
    (pack / "calibration/experts.json").write_text("[{}]")
    with pytest.raises(MoefitError, match="reports cannot be read"):
        pack_coverage(pack)
    rows = json.loads((tmp_path / "experts.json").read_bytes())
    rows[0]["tokens"] += 1
    write_json(pack / "calibration/experts.json", rows)
    with pytest.raises(MoefitError, match="do not belong together"):
        pack_coverage(pack)


# The picture


def test_the_picture_shows_every_count_and_the_floor() -> None:
    table = small_coverage().table
    drawn = figure(table, 3)
    heat, right, scale = drawn.axes
    shown = heat.images[0].get_array()
    assert shown.filled(0).tolist() == table.counts.tolist()
    assert (shown.mask == (table.counts == 0)).all()  # black: not a colour of the scale
    assert heat.images[0].norm(3) == pytest.approx(0.5)  # the floor is where red turns into blue
    assert [text.get_text() for text in heat.get_yticklabels()] == [str(layer) for layer in table.layers]
    ends = [line.get_segments() for line in right.collections]
    for row, counts in enumerate(table.counts):
        found = percentiles(counts)
        assert ends[0][row].tolist() == [[found["min"], row], [found["max"], row]]
        assert ends[1][row].tolist() == [[found["p5"], row], [found["p95"], row]]
        assert right.lines[0].get_xdata()[row] == found["p50"]
    assert all(axes.lines[-1].get_xdata() == [3, 3] for axes in (right, scale))
    without = figure(table, 0)
    assert "no floor; median 1 tokens" in without.get_suptitle()
    assert len(without.axes[1].lines) == 1 and not without.axes[2].lines


def test_the_picture_is_the_same_every_time_and_legible_without_fonts() -> None:
    table = small_coverage().table
    drawn = picture(table, 3)
    assert drawn == picture(table, 3)
    words = [element.text for element in ElementTree.fromstring(drawn).iter() if element.text]
    assert "Tokens per expert: 2 layers x 4 experts, 4 tokens, top-2, floor 3 tokens" in words
