"""Bad input is refused before any work: exit code 2 and one sentence that names the place and the mend."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moefit.calibrate.checkpoint import INDEX, Checkpoint

from ..calibrate.synthetic import edit_header
from ..packs.damage import edit_json
from ..small_model import Built, Inputs, poke
from .conftest import Moefit

MACHINE = ["--gpu", "12MB", "--host", "16MB"]


@pytest.fixture
def inputs(mini: Inputs, tmp_path: Path) -> Inputs:
    return mini.copy(tmp_path)


def refuse(moefit: Moefit, inputs: Inputs, *more: object) -> str:
    """The sentence of a build that is refused; it must leave nothing behind."""
    out = inputs.model.parent / "pack"
    words = ["build", inputs.model, "--traces", inputs.traces, "--eval", inputs.held_out, "--out", out, "--quiet"]
    message = moefit(*words, *([] if "--gpu" in more else MACHINE), *more).refusal()
    assert not out.exists()
    assert not out.with_name("pack.partial").exists()
    return message


def has(message: str, *parts: object) -> None:
    for part in parts:
        assert str(part) in message, message


# The checkpoint


def test_missing_shard(moefit: Moefit, inputs: Inputs) -> None:
    (inputs.model / "model-00003-of-00019.safetensors").unlink()
    has(refuse(moefit, inputs), "shards are missing", "model-00003-of-00019.safetensors", "Download the missing files.")


def test_truncated_shard(moefit: Moefit, inputs: Inputs) -> None:
    path = inputs.model / "model-00003-of-00019.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    has(refuse(moefit, inputs), "truncated", path, "7 bytes short", "Download the file again.")


def test_index_that_names_a_tensor_nobody_has(moefit: Moefit, inputs: Inputs) -> None:
    shard = "model-00003-of-00019.safetensors"
    edit_json(inputs.model / INDEX, lambda index: index["weight_map"].update({"layers.0.old": shard}))
    has(refuse(moefit, inputs), shard, "layers.0.old", "from the same revision.")


def test_index_that_lacks_a_tensor(moefit: Moefit, inputs: Inputs) -> None:
    edit_json(inputs.model / INDEX, lambda index: index["weight_map"].pop("layers.1.ffn.gate.bias"))
    has(refuse(moefit, inputs), "layers.1.ffn.gate.bias", "from the same revision.")


@pytest.mark.parametrize(
    ("name", "entry", "expected"),
    [
        ("norm.weight", {"dtype": "F16"}, "expected BF16 [256], found F16 [256]"),
        ("layers.0.ffn.experts.1.w1.weight", {"dtype": "U8"}, "expected I8 [128, 128], found U8 [128, 128]"),
        ("layers.0.ffn.gate.weight", {"shape": [256, 2]}, "expected BF16 [2, 256], found BF16 [256, 2]"),
        ("layers.1.ffn.experts.0.w2.scale", {"shape": [4, 256]}, "expected F8_E8M0 [256, 4], found F8_E8M0 [4, 256]"),
    ],
)
def test_wrong_dtype_or_shape(moefit: Moefit, inputs: Inputs, name: str, entry: dict[str, Any], expected: str) -> None:
    path = inputs.model / Checkpoint.open(inputs.model).info(name).file
    edit_header(path, lambda header: header[name].update(entry))
    has(refuse(moefit, inputs), f"[{path}, {name}]", expected, "Use config.json and shards from the same revision")


@pytest.mark.parametrize(
    ("name", "offset", "value"),
    [
        ("norm.weight", 6, np.uint16(0x7FC0).tobytes()),
        ("layers.2.attn.attn_sink", 4, np.float32(np.inf).tobytes()),
        ("layers.0.attn.wkv.weight", 3, b"\xff"),
        ("layers.1.ffn.experts.0.w3.scale", 11, b"\xff"),
    ],
)
def test_nan_and_infinity(moefit: Moefit, inputs: Inputs, name: str, offset: int, value: bytes) -> None:
    """Found by the first stage, before any calibration. Nothing stays behind: the mended file is another source."""
    sound = Checkpoint.open(inputs.model).bytes(name)
    poke(inputs.model, name, offset, value)
    has(refuse(moefit, inputs), "NaN", Checkpoint.open(inputs.model).where(name), "flat index", "download it again")
    poke(inputs.model, name, 0, sound)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (
            lambda c: c.update(architectures=["DeepseekV42ForCausalLM"]),
            ["config.json, architectures", "DeepseekV41ForCausalLM"],
        ),
        (lambda c: c["text_config"].update(num_hidden_layers=4), ["lacks", "its config promises", "layers.3."]),
        (
            lambda c: c["text_config"].update(moe_intermediate_size=100),
            ["config.json, text_config.moe_intermediate_size", "a multiple of 32"],
        ),
        (
            lambda c: c["text_config"].update(scoring_func="sigmoid"),
            ["config.json, text_config.scoring_func", "sqrtsoftplus", "sigmoid"],
        ),
        (lambda c: c.pop("quantization_config"), ["config.json, quantization_config"]),
    ],
)
def test_configuration(
    moefit: Moefit, inputs: Inputs, change: Callable[[dict[str, Any]], None], parts: list[str]
) -> None:
    edit_json(inputs.model / "config.json", change)
    has(refuse(moefit, inputs), *parts)


def test_a_pack_is_no_source(moefit: Moefit, mini_pack: Built, inputs: Inputs) -> None:
    taken = Inputs(mini_pack.path, inputs.traces, inputs.held_out)
    out = inputs.model.parent / "pack"
    words = ["build", taken.model, "--traces", taken.traces, "--eval", taken.held_out, "--out", out, *MACHINE]
    has(moefit(*words).refusal(), "config.json, quantization_config", "Start from the original release")


# The tokenizer


def test_tokenizer_of_another_model(moefit: Moefit, inputs: Inputs) -> None:
    def cut(tokenizer: dict[str, Any]) -> None:
        model = tokenizer["model"]
        model["vocab"] = {token: number for token, number in model["vocab"].items() if number < 2000}
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if all(part in model["vocab"] for part in (*pair, "".join(pair)))]

    edit_json(inputs.model / "tokenizer.json", cut)
    message = refuse(moefit, inputs)
    has(message, "tokenizer and model do not belong together", inputs.model / "tokenizer.json", "vocabulary of 4096")
    has(message, "0..1999. Use the tokenizer of the model's own release.")


def test_no_tokenizer(moefit: Moefit, inputs: Inputs) -> None:
    (inputs.model / "tokenizer.json").unlink()
    has(refuse(moefit, inputs), "no tokenizer", inputs.model / "tokenizer.json", "Download tokenizer.json")


# Traffic and held-out text


@pytest.mark.parametrize("which", ["traces", "held_out"])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["the trace file is empty", "Give at least one document."]),
        ("\n  \n", ["the trace file is empty"]),
        ('{"text": "fine"}\n{"text": "cut off\n', [":2]", "a line is not JSON", "Repair or remove the line."]),
        ('\n{"text": "fine"}\n\n{"txt": "x"}\n', [":4]", "a line is not a document", "txt"]),
        ('{"messages": []}\n', [":1]", "messages as a list of at least one"]),
        ('{"messages": [{"content": "no role"}]}\n', [":1]", "a message with a role"]),
        ('{"text": ""}\n', [":1]", "a document has no tokens", "Remove the line."]),
        ('{"text": "one <|image|> two ' + "three " * 200 + '"}\n', ["a window contains an image", "position"]),
        (b'{"text": "\xff\xfe"}\n', [":1]", "a line is not JSON"]),
    ],
)
def test_text(moefit: Moefit, inputs: Inputs, which: str, text: str | bytes, parts: list[str]) -> None:
    path: Path = getattr(inputs, which)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    message = refuse(moefit, inputs)
    has(message, *parts)
    has(message, "document" if "image" in parts[0] else path)


def test_documents_that_are_too_short(moefit: Moefit, inputs: Inputs) -> None:
    inputs.held_out.write_text('{"text": "a few words"}\n')
    has(refuse(moefit, inputs), "there is no window to run", "Give longer documents.")


def test_too_few_documents_to_hold_some_out(moefit: Moefit, inputs: Inputs) -> None:
    out = inputs.model.parent / "pack"
    words = ["build", inputs.model, "--traces", inputs.traces, "--out", out, *MACHINE]
    has(moefit(*words).refusal(), "too few documents to hold some out", "at least 5, found 2", "--eval")


@pytest.mark.parametrize("option", ["--traces", "--eval"])
def test_no_such_text(moefit: Moefit, inputs: Inputs, option: str) -> None:
    for path in (inputs.model.parent / "nowhere.jsonl", inputs.model):
        words = {"--traces": inputs.traces, "--eval": inputs.held_out} | {option: path}
        flat = [word for pair in words.items() for word in pair]
        has(moefit("build", inputs.model, *flat, "--out", inputs.model.parent / "p", *MACHINE).refusal(), path, "Give")


# Paths


def test_no_such_model(moefit: Moefit, inputs: Inputs) -> None:
    for path in (inputs.model.parent / "nowhere", inputs.traces):
        broken = Inputs(path, inputs.traces, inputs.held_out)
        has(refuse(moefit, broken), "no model directory", f"[{path}]", "Give the folder that holds config.json.")
        has(moefit("inspect", path).refusal(), "no model directory", f"[{path}]")
        has(moefit("gate", path, "--reference", inputs.model, "--eval", inputs.held_out).refusal(), f"[{path}]")


def test_output_that_is_not_empty(moefit: Moefit, inputs: Inputs) -> None:
    out = inputs.model.parent / "pack"
    words = ["build", inputs.model, "--traces", inputs.traces, "--eval", inputs.held_out, "--out", out, *MACHINE]
    out.mkdir()
    (out / "mine.txt").write_text("x")
    has(
        moefit(*words).refusal(), "the output directory is not empty", f"[{out}]", "Choose another --out, or remove it."
    )
    shutil.rmtree(out)
    out.write_text("a file")
    has(moefit(*words).refusal(), "not empty", f"[{out}]")
    assert out.read_text() == "a file"


def test_output_without_a_parent(moefit: Moefit, inputs: Inputs) -> None:
    message = refuse(moefit, inputs, "--out", inputs.model.parent / "a" / "b")
    has(message, "parent directory does not exist", f"[{inputs.model.parent / 'a'}]", "Create it.")


def test_output_inside_the_model(moefit: Moefit, inputs: Inputs) -> None:
    """Its own unfinished files would be copied into the pack."""
    for out in (inputs.model / "pack", inputs.model / "encoding" / "pack"):
        has(refuse(moefit, inputs, "--out", out), "inside the model's directory", f"[{out}]", "Choose an --out outside")


def test_unreadable_shard(moefit: Moefit, inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system says it (the superuser, who may run the tests, may read anything)."""
    shard = inputs.model / "model-00003-of-00019.safetensors"
    opened = Path.open

    def forbid(path: Path, *args: Any, **options: Any) -> Any:
        if path == shard:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(Path, "open", forbid)
    has(refuse(moefit, inputs), f"Permission denied [{shard}]")


@pytest.mark.parametrize("target", ["nowhere/file.json", "."])
def test_results_that_could_not_be_written(moefit: Moefit, mini_pack: Built, tmp_path: Path, target: str) -> None:
    path, inputs = tmp_path / target, mini_pack.inputs
    words = ["gate", mini_pack.path, "--reference", inputs.model, "--eval", inputs.held_out, "--receipt", path]
    has(
        moefit(*words).refusal(), "cannot be written there", f"[{path}]", "Give a file name in a directory that exists."
    )
    has(moefit("plan", mini_pack.path, "--out", path).refusal(), "cannot be written there", f"[{path}]")


# The machine


def test_not_enough_disk(moefit: Moefit, inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moefit.packs.needs.free_disk", lambda out: 1_000_000)
    message = refuse(moefit, inputs)
    has(message, "not enough disk", f"[{inputs.model.parent}]", "found 1,000,000 B free", "Free ", "another --out")
    has(refuse(moefit, inputs, "--dry-run"), "not enough disk")


def test_not_enough_memory(moefit: Moefit, inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moefit.packs.needs.free_memory", lambda: 100_000_000)
    has(refuse(moefit, inputs), "not enough memory", "found 100,000,000 B available", "Use fewer --threads")


def test_disk_that_fills_up(moefit: Moefit, inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence, and the same command goes on from there."""

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    out = inputs.model.parent / "pack"
    words = ["build", inputs.model, "--traces", inputs.traces, "--eval", inputs.held_out, "--out", out, *MACHINE]
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        message = moefit(*words, "--quiet").refusal()
    has(message, "No space left on device", "pack.partial", "Free disk space and run the same command again to go on.")
    assert not out.exists()


def test_experts_that_do_not_fit(moefit: Moefit, inputs: Inputs) -> None:
    checkpoint = Checkpoint.open(inputs.model)
    routed = [i.nbytes for n, i in checkpoint.tensors.items() if n.startswith("layers.") and ".ffn.experts." in n]
    engram = sum(i.nbytes for n, i in checkpoint.tensors.items() if ".engram.embed." in n)
    dense = sum(i.nbytes for i in checkpoint.tensors.values()) - sum(routed) - engram
    expert = 39_180

    room = ["--gpu", f"{dense + 4 * expert}B", "--host", f"{engram + expert + 5}B"]
    message = refuse(moefit, inputs, *room)
    has(message, "the experts do not fit", f"{expert:,} B too many", f"Add {expert:,} B of host memory (--host)")

    message = refuse(moefit, inputs, "--gpu", f"{dense - 100}B", "--host", "64MB")
    has(message, "overflow gpu0 by 100 B", "Give gpu0 100 B more")


# Options


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--codebook", "mul2"], ["unknown codebook: 'mul2'", "Choose one of mul1, mcg, 3inst."]),
        (["--codebook", "mcg", "--bits", "2.5"], ["K=2.5 with codebook mcg", "half-integer K needs codebook mul1."]),
        (["--bits", "9"], ["K=9", "Choose K = 1..8"]),
        (["--bits", "nan"], ["K=nan"]),
        (["--damping", "0", "--one-sided"], ["damping out of range: 0", "Choose 0 < damping <= 1."]),
        (["--shrinkage", "-1", "--one-sided"], ["the recipe makes no sense", "shrinkage >= 0"]),
        (["--damping", "0.1", "--shrinkage", "5"], ["--damping and --shrinkage would not change a two-sided build"]),
        (["--shrinkage", "1000"], ["--shrinkage would not change", "Add --one-sided, or leave that option out."]),
        (["--one-sided", "--copies", "0"], ["--copies would not change a one-sided build", "Leave out --one-sided"]),
        (["--enough-tokens", "-1"], ["the recipe makes no sense", "enough_tokens >= 0"]),
        (["--window", "1"], ["the recipe makes no sense", "window >= 2"]),
        (["--max-kl", "0"], ["max_kl must be positive, in nats", "found 0"]),
        (["--max-kl", "nan"], ["max_kl must be positive"]),
        (["--gpu", "96 apples"], ["unknown unit of bytes ['96 apples']", "96GiB"]),
        (["--gpu", "96G"], ['"96GB" (thousands) or "96GiB"']),
        (["--gpu", "8GB:9GB"], ["a card cannot reserve more than it has", "Give --gpu BYTES or --gpu BYTES:RESERVE."]),
        (["--host", "much"], ["not a number of bytes ['much']"]),
    ],
)
def test_options(moefit: Moefit, inputs: Inputs, words: list[str], parts: list[str]) -> None:
    has(refuse(moefit, inputs, *words), *parts)


def test_every_refusal_of_a_pack(moefit: Moefit, tmp_path: Path) -> None:
    """A directory that is none."""
    (tmp_path / "moefit.json").write_text(json.dumps({"format": "other"}))
    for words in (["report", tmp_path], ["plan", tmp_path, "--out", f"{tmp_path}-plan.json"]):
        has(
            moefit(*words).refusal(),
            "manifest",
            str(tmp_path / "moefit.json"),
            "restore moefit.json, or build".capitalize(),
        )
