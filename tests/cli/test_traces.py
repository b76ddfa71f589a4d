"""`moefit traces`, and `moefit build` on what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from moefit.calibrate.traces import load_tokenizer, read_documents
from moefit.packs.manifest import read_manifest

from ..calibrate.importers.samples import AIDER, ANTHROPIC, CHAT, write
from ..small_model import Inputs, digests
from .conftest import Moefit


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    write(folder / "a.jsonl", {"messages": CHAT[:3]}, {"messages": CHAT}, {"text": "in /home/jane"})
    write(folder / "b.jsonl", ANTHROPIC)  # the same errand: counted once
    (folder / "c.md").write_text(AIDER)
    (folder / "d.bin").write_bytes(bytes(100))
    return folder


def test_traces(logs: Path, tiny_v41: Path, tmp_path: Path, moefit: Moefit) -> None:
    out = tmp_path / "t.parquet"
    done = moefit("traces", logs, "--model", tiny_v41, "--out", out, "--shares", "1,0,0")
    assert done.code == 0
    for line in (
        *(
            "logs/a.jsonl: openai (records with `messages`), 3 records, 0 bad",
            "skipped, in no known format: logs/d.bin",
        ),
        *("traffic       3 documents, ", "repeated      2 records", "1 home directories", f"written to {out}"),
    ):
        assert line in done.out, line
    assert done.err.splitlines()[0].startswith("read: ")
    value = moefit("traces", logs, "--model", tiny_v41, "--out", out, "--shares", "1,0,0", "--json", "--quiet")
    assert value.err == ""
    assert value.json["tokens"] == sum(len(row["ids"]) for row in pq.read_table(out).to_pylist())


def test_dry_run_writes_nothing(logs: Path, tiny_v41: Path, tmp_path: Path, moefit: Moefit) -> None:
    before = digests(tmp_path)
    words = ["traces", logs, "--model", tiny_v41, "--out", tmp_path / "t.parquet", "--shares", "1,0,0", "--dry-run"]
    done = moefit(*words)
    assert done.code == 0
    assert done.out.endswith("nothing written\n")
    assert digests(tmp_path) == before


def test_refusals(logs: Path, tiny_v41: Path, tmp_path: Path, moefit: Moefit) -> None:
    words = ["--model", tiny_v41, "--out", tmp_path / "t.parquet", "--quiet"]
    assert "nothing to import" in moefit("traces", tmp_path / "absent", *words).refusal()
    assert "not recognised" in moefit("traces", logs / "d.bin", *words).refusal()
    assert "found opnai" in moefit("traces", logs, *words, "--format", "opnai").refusal()
    assert "add up to 1" in moefit("traces", logs, *words, "--shares", "1,1,1").refusal()
    (logs / "b.jsonl").write_text("{\n{\n")
    assert "b.jsonl:1" in moefit("traces", logs / "b.jsonl", *words, "--format", "openai").refusal()
    assert moefit("traces", "--model", tiny_v41, "--out", "t").code == 2
    assert not (tmp_path / "t.parquet").exists()


def test_code_of_the_checkpoint_runs_only_if_told(mini: Inputs, logs: Path, tmp_path: Path, moefit: Moefit) -> None:
    model = mini.copy(tmp_path).model
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    code = "def encode_messages(messages, thinking_mode):\n    return ''.join(m['content'] for m in messages)\n"
    (model / "encoding" / "encoding.py").write_text(code)
    words = ["traces", logs, "--model", model, "--out", tmp_path / "t.parquet", "--shares", "1,0,0", "--quiet"]
    assert "--run-encoding" in moefit(*words).refusal()
    assert moefit(*words, "--run-encoding").code == 0
    first = read_documents(tmp_path / "t.parquet", load_tokenizer(mini.model))[0]
    assert load_tokenizer(mini.model).decode(first.ids) == "You list files.What is here?a.pyOne file."


def test_build_from_a_trace_set(mini: Inputs, tiny_v41: Path, tmp_path: Path, moefit: Moefit) -> None:
    """Calibration takes its part, the gate the held-out one; the plan's part is in neither."""
    out, pack = tmp_path / "t.parquet", tmp_path / "pack"
    text = (tiny_v41.parent / "traffic.jsonl").read_text().splitlines()
    (tmp_path / "log.jsonl").write_text("".join(f"{line}\n" for line in text if len(line) < 3000))
    made = moefit(
        "traces", tmp_path / "log.jsonl", "--model", mini.model, "--out", out, "--shares", "0.25,0.2,0.55", "--json"
    )
    assert made.code == 0
    parts = made.json["parts"]
    assert all(part["documents"] for part in parts.values())
    words = ["build", mini.model, "--traces", out, "--out", pack, "--window", 128, "--bits", 2, "--max-kl", 5]
    machine = ["--gpu", "12MB", "--host", "16MB", "--quiet"]
    dry = moefit(*words, *machine, "--dry-run", "--json").json
    assert dry["documents"] == parts["calibrate"]["documents"]
    assert moefit(*words, *machine).code in (0, 3)
    manifest = read_manifest(pack)
    assert manifest["recipe"]["hold_out"] == 0
    assert manifest["calibration"]["documents"] == parts["calibrate"]["documents"]
    (corpus,) = manifest["fidelity"]["corpora"].values()
    tokenizer = load_tokenizer(mini.model)
    long = {part: sum(d.ids.size >= 100 for d in read_documents(out, tokenizer, part=part)) for part in parts}
    assert corpus["documents"] == long["held-out"] not in (long["calibrate"], long["plan"])
