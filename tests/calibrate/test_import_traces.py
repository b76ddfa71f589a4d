"""A whole import: what goes in, what comes out, what stops it."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moefit.calibrate import import_traces as module
from moefit.calibrate.import_traces import ImportRequest, import_traces
from moefit.calibrate.traces import load_tokenizer, read_documents
from moefit.errors import TraceError

from .importers.samples import ANTHROPIC, CHAT, write


@pytest.fixture(scope="module")
def tokenizer(tiny_v41: Path) -> Any:
    return load_tokenizer(tiny_v41)


@pytest.fixture
def quick(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer loaded once."""
    monkeypatch.setattr(module, "load_tokenizer", lambda _: tokenizer)


def talk(*words: str, **more: Any) -> dict[str, Any]:
    """User and assistant in turn, behind a system prompt."""
    turns = [{"role": ("user", "assistant")[n % 2], "content": word} for n, word in enumerate(words)]
    return {"messages": [{"role": "system", "content": "Be brief."}, *turns], **more}


def run(model: Path, out: Path, *logs: Path, **options: Any) -> dict[str, Any]:
    return import_traces(ImportRequest(tuple(map(str, logs)), model, out, **{"shares": (1.0, 0.0, 0.0), **options}))


def texts(out: Path, tokenizer: Any, part: str = "calibrate") -> list[str]:
    return [tokenizer.decode(d.ids) for d in read_documents(out, tokenizer, part=part)]


def test_each_request_of_an_agent_repeats_the_history(
    quick: None, tiny_v41: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """Three requests are one document; a branch holds only what is new, and says how much came before."""
    log = write(
        tmp_path / "log.jsonl",
        talk("one", "two"),
        talk("one", "two", "three", "four"),
        talk("one", "two", "three", "four", "five", "six"),
        talk("one", "two", "other", "way"),
        talk("another", "talk"),
    )
    made = run(tiny_v41, tmp_path / "t.parquet", log)
    assert (made["records"], made["repeated"], made["documents"], made["bad"]) == (5, 2, 3, 0)
    whole, branch, apart = texts(tmp_path / "t.parquet", tokenizer)
    assert whole.startswith("<|bos|><|system|>")
    assert whole.count("one") == 1
    assert "six" in whole
    assert "Be brief." not in branch
    assert ["one" in branch, "two" in branch, "other" in branch, "way" in branch] == [False, False, True, True]
    assert "Be brief." in apart  # the system prompt of another conversation stays
    rows = pq.read_table(tmp_path / "t.parquet").to_pylist()
    assert [row["shared_tokens"] > 0 for row in rows] == [False, True, False]
    assert made["shared_tokens"] == rows[1]["shared_tokens"]
    assert made["tokens"] == sum(len(row["ids"]) for row in rows)


word = st.sampled_from(["a", "b", "c"])


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(word, min_size=2, max_size=5), min_size=1, max_size=5), st.integers(0, 99))
def test_tokens_do_not_depend_on_the_order_of_a_log(
    quick: None, tiny_v41: Path, tmp_path: Path, talks: list[list[str]], seed: int
) -> None:
    records = [talk(*words[:n]) for words in talks for n in range(2, len(words) + 1)]
    random.Random(seed).shuffle(records)
    shuffled = run(tiny_v41, tmp_path / "t.parquet", write(tmp_path / "log.jsonl", *records))
    longest = run(tiny_v41, tmp_path / "t.parquet", write(tmp_path / "log.jsonl", *(talk(*words) for words in talks)))
    assert shuffled["tokens"] == longest["tokens"]
    assert shuffled["tokens_by_role"] == longest["tokens_by_role"]


def test_counts_by_source_role_and_language(quick: None, tiny_v41: Path, tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", {"messages": CHAT})
    two = write(tmp_path / "two.jsonl", talk("Привет", "```python\nx = 1\n```"), {"text": "plain words"})
    made = run(tiny_v41, tmp_path / "t.parquet", one, two)
    for table in ("source", "role", "language"):
        assert sum(made[f"tokens_by_{table}"].values()) == made["tokens"]
    assert made["tokens_by_source"].keys() == {"one.jsonl", "two.jsonl"}
    assert made["tokens_by_role"].keys() == {"template", "system", "user", "assistant", "tool", "tool_call", "text"}
    assert made["tokens_by_language"].keys() == {"markup", "latin", "cyrillic", "code:python"}
    assert [f["format"] for f in made["files"]] == ["openai", "openai"]


def test_parts(quick: None, tiny_v41: Path, tokenizer: Any, tmp_path: Path) -> None:
    """Trials of one task stay together; every part is there and no document is in two."""
    log = write(tmp_path / "log.jsonl", *(talk(f"ask {n}", f"{n} {n % 20}", task=f"t{n % 20}") for n in range(60)))
    made = run(tiny_v41, tmp_path / "t.parquet", log, shares=(0.5, 0.25, 0.25))
    rows = pq.read_table(tmp_path / "t.parquet").to_pylist()
    parts = {row["task"]: {r["split"] for r in rows if r["task"] == row["task"]} for row in rows}
    assert len(parts) == 20
    assert all(len(found) == 1 for found in parts.values())
    assert {row["split"] for row in rows} == {"calibrate", "plan", "held-out"}
    assert sum(counts["conversations"] for counts in made["parts"].values()) == 20
    assert {d.id for d in read_documents(tmp_path / "t.parquet", tokenizer)} == {
        row["document"] for row in rows if row["split"] == "calibrate"
    }


def test_redaction_and_its_absence(quick: None, tiny_v41: Path, tokenizer: Any, tmp_path: Path) -> None:
    key = "sk-" + "a1B2" * 10
    log = write(tmp_path / "log.jsonl", talk(f"use {key}", "mail a@b.io in /home/jane/x"))
    made = run(tiny_v41, tmp_path / "t.parquet", log)
    assert made["redacted"] == {"keys": 1, "emails": 1, "homes": 1}
    (text,) = texts(tmp_path / "t.parquet", tokenizer)
    assert "use [key]" in text
    assert "someone@example.com in /home/user/x" in text
    assert run(tiny_v41, tmp_path / "t.parquet", log, redact=False)["redacted"] == {"keys": 0, "emails": 0, "homes": 0}
    assert key in texts(tmp_path / "t.parquet", tokenizer)[0]


def test_bad_records_are_counted_and_too_many_stop(quick: None, tiny_v41: Path, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f"{json.dumps(talk(f'q{n}', 'a'))}\n" for n in range(18)) + '{"messages": [\n{"x": 1}\n')
    out = tmp_path / "t.parquet"
    with pytest.raises(TraceError, match=r"log\.jsonl:19\]: expected at most 5.00% bad, found 2 of 20.*not JSON"):
        run(tiny_v41, out, path)
    assert list(tmp_path.iterdir()) == [path]
    made = run(tiny_v41, out, path, max_bad=0.1)
    assert (made["bad"], made["documents"]) == (2, 18)
    assert [bad["where"] for bad in made["bad_records"]] == ["log.jsonl:19", "log.jsonl:20"]


def test_what_the_template_refuses_is_bad(
    tiny_v41: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known only in the second pass: the file that was begun is taken back, an older one stays."""
    monkeypatch.setattr(module, "load_tokenizer", lambda _: tokenizer)
    monkeypatch.setattr(
        tokenizer, "chat_template", "{{ raise_exception('no') if messages[1].content == 'bad' else 'x' }}"
    )
    log = write(tmp_path / "log.jsonl", *(talk(word, "x") for word in ("fine", "bad", "good")))
    out = tmp_path / "t.parquet"
    out.write_bytes(b"older")
    with pytest.raises(TraceError, match=r"log\.jsonl:2\].*found 1 of 3.*template refuses"):
        run(tiny_v41, out, log)
    assert out.read_bytes() == b"older"
    assert {path.name for path in tmp_path.iterdir()} == {"log.jsonl", "t.parquet"}
    assert run(tiny_v41, out, log, max_bad=0.5)["documents"] == 2


def test_half_a_character_is_bad(quick: None, tiny_v41: Path, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(talk("fine", "x")) + "\n" + r'{"text": "cut \ud83d"}' + "\n")
    assert run(tiny_v41, tmp_path / "t.parquet", path, max_bad=0.5)["bad_records"][0]["where"] == "log.jsonl:2"


def test_a_conversation_beyond_the_limit_is_bad(
    quick: None, tiny_v41: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CONVERSATION", 100)
    log = write(tmp_path / "log.jsonl", talk("fine", "x"), talk("y" * 200, "x"))
    made = run(tiny_v41, tmp_path / "t.parquet", log, max_bad=0.5)
    assert "more than 100 characters" in made["bad_records"][0]["why"]


def test_a_log_that_grows_meanwhile_is_refused(
    quick: None, tiny_v41: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = write(tmp_path / "log.jsonl", talk("one", "two"))
    real = module.render

    def grow(*arguments: Any) -> Any:
        with log.open("a") as file:
            file.write(json.dumps(talk("three", "four")) + "\n")
        return real(*arguments)

    monkeypatch.setattr(module, "render", grow)
    with pytest.raises(TraceError, match="a file changed while it was read"):
        run(tiny_v41, tmp_path / "t.parquet", log)
    assert not (tmp_path / "t.parquet").exists()


def test_requests_that_make_no_sense(quick: None, tiny_v41: Path, tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", talk("one", "two"))
    for out, message in (
        (tmp_path / "absent" / "t.parquet", "cannot be written there"),
        (tmp_path, "cannot be written there"),
        (log, "would replace a log"),
    ):
        with pytest.raises(TraceError, match=message):
            run(tiny_v41, out, log)
    with pytest.raises(TraceError, match="expected 0 to 1, found 3"):
        run(tiny_v41, tmp_path / "t.parquet", log, max_bad=3)
    with pytest.raises(TraceError, match=r"expected at most .* found 1 of 1"):
        run(tiny_v41, tmp_path / "t.parquet", log, form="tau-bench")
    part = run(tiny_v41, tmp_path / "t.parquet", log, shares=(0.0, 1.0, 0.0))["parts"]["plan"]
    assert part["documents"] == 1
    with pytest.raises(TraceError, match=r"no conversation fell into the part for calibration.*--shares 1,0,0"):
        run(tiny_v41, tmp_path / "t.parquet", log, shares=(1e-9, 1 - 1e-9, 0.0))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(TraceError, match="hold no text"):
        run(tiny_v41, tmp_path / "t.parquet", tmp_path / "empty.jsonl", form="openai")


def test_files_of_a_directory_in_no_format_are_skipped(quick: None, tiny_v41: Path, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    write(tmp_path / "logs" / "a.jsonl", talk("one", "two"))
    write(tmp_path / "logs" / "b.jsonl", ANTHROPIC)
    (tmp_path / "logs" / "c.bin").write_bytes(bytes(200))
    made = run(tiny_v41, tmp_path / "t.parquet", tmp_path / "logs")
    assert [f["format"] for f in made["files"]] == ["openai", "anthropic"]
    assert made["skipped"] == ["logs/c.bin"]


def test_the_same_import_is_the_same_file(quick: None, tiny_v41: Path, tmp_path: Path) -> None:
    """Compressed or not, but for the name."""
    log = write(tmp_path / "log.jsonl", {"messages": CHAT}, talk("one", "two"))
    run(tiny_v41, tmp_path / "1.parquet", log)
    data = log.read_bytes()
    log.write_bytes(gzip.compress(data))
    run(tiny_v41, tmp_path / "2.parquet", log)
    assert (tmp_path / "1.parquet").read_bytes() == (tmp_path / "2.parquet").read_bytes()


def test_real_logs(tiny_v41: Path, tokenizer: Any, shared: Path, tmp_path: Path) -> None:
    """Everything in the shared folder at once: all of it is read, and what people typed is in the tokens."""
    out = tmp_path / "t.parquet"
    made = run(tiny_v41, out, shared / "raw-traces", shares=(0.6, 0.2, 0.2))
    assert (made["bad"], made["skipped"]) == (0, [])
    assert {f["format"] for f in made["files"]} == {
        *("aider", "claude-code", "mini-swe-agent", "swe-agent", "tau-bench", "text")
    }
    assert 90_000 < made["tokens"] < 140_000
    assert made["tokens_by_role"]["template"] < 0.02 * made["tokens"]  # spans were found, not given up
    runs = json.loads((shared / "raw-traces" / "tau-bench.json").read_text())
    rows = [row for row in pq.read_table(out).to_pylist() if row["source"].endswith("tau-bench.json")]
    assert len(rows) == len(runs)
    for row, real in zip(rows, runs, strict=True):
        text = tokenizer.decode(row["ids"])
        assert all((m["content"] or "").strip() in text for m in real["traj"] if "@" not in (m["content"] or ""))
        spans = [s for s in row["roles"] if s["role"] == "tool"]
        assert len(spans) == sum(m["role"] == "tool" and m["content"] != "" for m in real["traj"])


MEASURE = """
import resource, sys
from pathlib import Path
from moefit.calibrate.import_traces import ImportRequest, import_traces
log, model, out = sys.argv[1:]
made = import_traces(ImportRequest((log,), Path(model), Path(out), shares=(1, 0, 0)))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, made["documents"], made["repeated"], made["tokens"])
"""


@pytest.mark.slow
def test_memory_of_a_20_mb_log(tiny_v41: Path, tmp_path: Path) -> None:
    """Of a log a hundred times as long, at most 60 MiB more: the text is never held."""

    def measure(talks: int) -> list[int]:
        log = tmp_path / f"{talks}.jsonl"
        chance = random.Random(1)
        with log.open("w") as file:
            for _ in range(talks):
                said = [" ".join(str(chance.random()) for _ in range(60)) for _ in range(20)]
                for n in range(2, 21, 2):
                    file.write(json.dumps(talk(*said[:n])) + "\n")
        words = [sys.executable, "-c", MEASURE, log, tiny_v41, tmp_path / "t.parquet"]
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=True, env=os.environ)
        print(log.stat().st_size, done.stdout)
        return [log.stat().st_size, *map(int, done.stdout.split())]

    small, large = measure(2), measure(160)
    assert large[0] > 20_000_000
    assert (large[2], large[3]) == (160, 160 * 9)
    assert large[1] - small[1] < 60
