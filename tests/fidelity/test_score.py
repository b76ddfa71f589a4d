"""Original against pack, run for real: no change is a KL of exactly 0, more bits are nearer, nonsense is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moefit.calibrate.checkpoint import Checkpoint
from moefit.calibrate.deepseek_v41.model import V41Layer, V41Model
from moefit.calibrate.stream import Experts, run_model
from moefit.errors import FidelityError, PackError
from moefit.fidelity import Corpus, Policy, judge, read_receipt
from moefit.fidelity.examine import examiner
from moefit.fidelity.score import HeldOut, gate, read_held_out, receipt_summary, score
from moefit.packs import Pack
from moefit.progress import Silent

from ..calibrate.synthetic import Stored
from ..packs.damage import edit_json, rewrite, shard_of
from ..small_model import RECIPE, Built, Inputs, poke


@pytest.fixture(scope="module")
def held_out(mini: Inputs) -> HeldOut:
    return read_held_out(mini.model, [mini.held_out])


def test_ids_stay_unique_over_the_files_of_a_corpus(mini: Inputs, tmp_path: Path) -> None:
    lines, files = mini.held_out.read_text().splitlines(), []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        files.append(tmp_path / name / "x.jsonl")
        nameless = [{key: value for key, value in json.loads(line).items() if key != "id"} for line in lines]
        files[-1].write_text("\n".join(map(json.dumps, nameless)))
    cut = read_held_out(mini.model, files, shortest=2).windows
    assert len({window.document for windows in cut.values() for window in windows}) == 2 * len(lines)
    with pytest.raises(FidelityError, match="given twice"):
        read_held_out(mini.model, [files[0], files[0]])


def mean_kl(corpora: dict[str, Corpus]) -> float:
    rows = [row for corpus in corpora.values() for row in corpus.windows]
    return sum(row.kl for row in rows) / sum(row.tokens for row in rows)


def test_the_original_against_itself_is_exactly_zero(
    mini_pack: Built, held_out: HeldOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pack whose experts are the original's: every other tensor is read from the pack's own files."""
    original = V41Model(Checkpoint.open(mini_pack.inputs.model))

    def experts(pack: Pack, layer: V41Layer, device: str) -> Experts:
        return original.load_layer(layer.index).expert

    monkeypatch.setattr(Pack, "experts", experts)
    for corpus in score(mini_pack.inputs.model, mini_pack.path, held_out, 2).values():
        for row in corpus.windows:
            assert row.kl == 0.0
            assert row.kl_squares == 0.0
            assert row.top1_hits == row.tokens
            assert row.reference_nll == row.candidate_nll
        assert corpus.control.self_kl == 0.0


def test_more_bits_are_nearer(mini_pack: Built, held_out: HeldOut, tmp_path: Path) -> None:
    mini_pack.inputs.build(tmp_path / "pack", gate=False, recipe=replace(RECIPE, bits=2.0))
    two, three = (
        mean_kl(score(mini_pack.inputs.model, path, held_out, 2)) for path in (tmp_path / "pack", mini_pack.path)
    )
    assert 0 < 1.5 * three < two


def test_against_plain_arithmetic(mini_pack: Built, held_out: HeldOut) -> None:
    """Each window alone, through the whole models, KL and top-1 spelled out."""
    model, pack = V41Model(Checkpoint.open(mini_pack.inputs.model)), Pack(mini_pack.path)
    measured = score(mini_pack.inputs.model, mini_pack.path, held_out, 2)
    assert measured.keys() == held_out.windows.keys()
    for corpus, windows in held_out.windows.items():
        assert [row.document for row in measured[corpus].windows] == [window.document for window in windows]
        for row, window in zip(measured[corpus].windows, windows, strict=True):
            ids = torch.from_numpy(window.ids).long()
            ours = model.logits(run_model(model, [ids], 1)[0]).double().log_softmax(-1)
            theirs = pack.model()
            their_logits = theirs.logits(run_model(theirs, [ids], 1, pack.experts)[0]).double()
            other = their_logits.log_softmax(-1)
            kl = (ours.exp() * (ours - other)).sum(-1)  # [T]
            assert row.tokens == len(ids)
            assert row.kl == pytest.approx(float(kl.sum()), rel=1e-3)
            assert row.top1_hits == pytest.approx(int((ours.argmax(-1) == other.argmax(-1)).sum()), abs=1)
            following = ids[1:, None]
            assert row.reference_nll == pytest.approx(-float(ours[:-1].gather(1, following).sum()), rel=1e-5)
            assert row.candidate_nll == pytest.approx(-float(other[:-1].gather(1, following).sum()), rel=1e-4)


def test_the_measurement_is_of_a_trained_model(mini_pack: Built, small_pack: Built) -> None:
    """Better than chance by far, and the control far off: otherwise the numbers above would say nothing."""
    for built in (mini_pack, small_pack):
        receipt = read_receipt(built.path / "fidelity.json")
        for corpus in receipt.corpora.values():
            assert corpus.control.kl > 1.0
            assert corpus.control.top1 < 0.02
            nll = sum(row.reference_nll for row in corpus.windows) / sum(row.tokens - 1 for row in corpus.windows)
            assert nll < 0.95 * np.log(4096)


def test_progress_adds_up(mini_pack: Built, held_out: HeldOut) -> None:
    class Count(Silent):
        total = done = 0

        def stage(self, name: str, total: int, unit: str, done: int = 0) -> None:
            self.total += total

        def advance(self, count: int = 1, note: str = "") -> None:
            self.done += count

    progress = Count()
    score(mini_pack.inputs.model, mini_pack.path, held_out, 2, progress)
    assert progress.total == progress.done == 2 * 3 + sum(map(len, held_out.windows.values()))


# The receipt


def test_the_receipt_of_a_built_pack_reads_back_and_judges_the_same(small_pack: Built) -> None:
    receipt = read_receipt(small_pack.path / "fidelity.json")
    assert judge(receipt.corpora, receipt.policy) == receipt.verdict
    assert receipt_summary(receipt) == small_pack.manifest["fidelity"]
    assert receipt.protocol.window_tokens == 512
    assert receipt.inputs.keys() == {"reference", "candidate", "tokenizer"}
    stricter = judge(receipt.corpora, Policy(1e-4))
    assert (receipt.verdict.exit_code, stricter.exit_code) == (0, 1)


def test_the_receipt_does_not_depend_on_threads_or_place(mini_pack: Built, tmp_path: Path) -> None:
    inputs = mini_pack.inputs.copy(tmp_path)
    for threads in (1, 3):
        found = examiner(inputs.model, [inputs.held_out], 5.0, threads).run(mini_pack.path, Silent())
        assert found.receipt == (mini_pack.path / "fidelity.json").read_bytes()


def test_another_original_gives_another_receipt(mini_pack: Built, held_out: HeldOut, tmp_path: Path) -> None:
    inputs = mini_pack.inputs.copy(tmp_path)
    data = Checkpoint.open(inputs.model).bytes("layers.2.ffn.experts.1.w1.weight")
    poke(inputs.model, "layers.2.ffn.experts.1.w1.weight", 0, data[::-1])
    other = gate(inputs.model, mini_pack.path, held_out, Policy(5.0), 2)
    receipt = read_receipt(mini_pack.path / "fidelity.json")
    assert other.inputs["reference"] != receipt.inputs["reference"]
    assert other.inputs["candidate"] == receipt.inputs["candidate"]
    assert mean_kl(dict(other.corpora)) > mean_kl(dict(receipt.corpora))


# What is compared on


def texts(tmp_path: Path, name: str, *lines: dict[str, str]) -> Path:
    path = tmp_path / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_held_out_documents_are_cut_as_the_protocol_says(mini: Inputs, tmp_path: Path) -> None:
    words = "the quick brown fox jumps over the lazy dog and "
    path = texts(
        tmp_path, "prose.jsonl",
        {"id": "long", "text": words * 500}, {"id": "short", "text": words * 20}, {"id": "tiny", "text": "a b"},
        {"id": "code", "text": words * 20, "corpus": "code"},
    )  # fmt: skip
    held = read_held_out(mini.model, [path])
    assert {corpus: [w.document for w in cut] for corpus, cut in held.windows.items()} == {
        "code": ["code"],
        "prose": ["long", "long", "short"],
    }
    lengths = [len(window.ids) for window in held.windows["prose"]]
    assert lengths[:2] == [512, 512]
    assert 100 <= lengths[2] < 512
    assert held.sha256.keys() == {"code", "prose"}

    twice = read_held_out(mini.model, [path, texts(tmp_path, "more.jsonl", {"text": words * 20})])
    assert twice.windows.keys() == {"code", "more", "prose"}
    assert twice.sha256["prose"] == held.sha256["prose"]
    second = read_held_out(mini.model, [path], every=2)
    assert {corpus: [w.document for w in cut] for corpus, cut in second.windows.items()} == {
        "code": ["code"],
        "prose": ["short"],
    }


def test_nothing_to_compare_on(mini: Inputs) -> None:
    with pytest.raises(FidelityError, match="nothing to compare on.*--eval"):
        read_held_out(mini.model, [])


# What means nothing


def test_packs_of_other_models_are_refused(mini_pack: Built, small_pack: Built, held_out: HeldOut) -> None:
    message = r"different models \[.*layers\]: original has 3, pack has 6.*Compare a pack with what it was"
    with pytest.raises(FidelityError, match=message):
        score(mini_pack.inputs.model, small_pack.path, held_out, 2)


def test_another_vocabulary_is_refused(mini_pack: Built, held_out: HeldOut, tmp_path: Path) -> None:
    pack = mini_pack.copy(tmp_path)

    def cut(tensors: Stored) -> None:
        for name in tensors.keys() & {"embed.weight", "head.weight"}:
            dtype, (rows, columns), data = tensors[name]
            assert data is not None
            tensors[name] = (dtype, (rows - 64, columns), data[: (rows - 64) * columns * 2])

    for name in ("embed.weight", "head.weight"):
        rewrite(pack, shard_of(pack, name), cut)
    edit_json(pack / "config.json", lambda config: config["text_config"].update(vocab_size=4032))
    with pytest.raises(FidelityError, match=r"different models \[.*vocabulary\]: original has 4096, pack has 4032"):
        score(mini_pack.inputs.model, pack, held_out, 2)


@pytest.fixture
def untrained(mini_pack: Built, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Original and pack whose output head is zero, so that every distribution is uniform."""
    inputs, pack = mini_pack.inputs.copy(tmp_path), mini_pack.copy(tmp_path)
    for folder in (inputs.model, pack):
        poke(folder, "head.weight", 0, bytes(Checkpoint.open(folder).info("head.weight").nbytes))
    yield inputs.model, pack
    shutil.rmtree(pack)


def test_a_control_that_does_not_fail_is_refused(untrained: tuple[Path, Path], held_out: HeldOut) -> None:
    """With uniform distributions the pack agrees perfectly, and so would anything."""
    measured = score(*untrained, held_out, 2)
    assert mean_kl(measured) == 0.0
    with pytest.raises(FidelityError, match="the negative control did not fail"):
        gate(*untrained, held_out, Policy(5.0), 2)


def test_a_pack_that_cannot_be_decoded_is_refused(mini_pack: Built, held_out: HeldOut, tmp_path: Path) -> None:
    pack = mini_pack.copy(tmp_path)
    for expert in (0, 1):
        poke(pack, f"layers.1.ffn.experts.{expert}.w2.svh", 2, np.float16(np.nan).tobytes())
    with pytest.raises(PackError, match=r"a scale is not finite \[.*layers\.1\.ffn\.experts\.[01]\.w2\.svh\]"):
        score(mini_pack.inputs.model, pack, held_out, 2)
