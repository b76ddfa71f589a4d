"""Captures that cannot be true, are damaged or are of another model: each refused, with the reason."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefit.errors import CheckpointError, TraceError
from moefit.placement import TrafficTable
from moefit.placement.captures import MoeShape, read_capture, read_captures

from . import writers as w

SHAPE = MoeShape(6, (2, 3, 4, 5), 8, 3)
IDS = w.random_ids(SHAPE, 9)
COUNTS = w.plain_counts(IDS, SHAPE.experts)
MAP = w.expert_map(SHAPE, 2)


def changed(values: np.ndarray, place: Any, value: Any) -> np.ndarray:
    copy = values.copy()
    copy[place] = value
    return copy


def refused(path: Path, message: str, shape: MoeShape = SHAPE, form: str | None = None) -> None:
    """message: a regular expression. Every refusal names the file."""
    with pytest.raises(TraceError, match=message) as caught:
        read_capture(path, shape, form)
    assert str(path) in str(caught.value)
    assert caught.value.mend or caught.value.found


# Routing that cannot be true, in every format that holds ids

BAD_IDS = {
    r"all-zero routing rows.*layer 3, row 4": changed(IDS, (slice(4, 6), 1), 0),
    r"an expert occurs twice.*layer 2, row 0.*\[7, 7, 1\]": changed(IDS, (0, 0), [7, 7, 1]),
    r"routing id out of range.*layer 5, row 8.*0 <= id < 8, found 8": changed(IDS, (8, 3, 0), 8),
    r"part of a token's routing is missing.*row 2": changed(IDS, (2, 1), -1),
    r"wrong number of layers.*expected 6 in all, or the 4 with experts \(layers 2-5\), found 3": IDS[:, :3],
    r"wrong shape.*\[tokens, layers, 3\], found \[\d, 4, 2\]": IDS[:, :, :2],
    r"a dense layer has routed tokens": changed(w.all_layers(IDS, SHAPE, 1), (3, 0), [1, 2, 3]),
    r"nothing was recorded": np.full_like(IDS, -1),
    r"not integers.*float64": IDS.astype(float),
}


@pytest.mark.parametrize("message", BAD_IDS)
def test_routing_that_cannot_be_true(tmp_path: Path, message: str) -> None:
    ids = BAD_IDS[message]
    np.save(tmp_path / "ids.npy", ids)
    refused(tmp_path / "ids.npy", message)
    refused(w.json_lines(tmp_path / "lists.jsonl", w.vllm_answer(ids, 4, routed=ids.tolist())), message)
    refused(
        w.json_lines(tmp_path / "base64.jsonl", w.vllm_answer(ids, 4, routed=w.npy_base64(ids, str(ids.dtype)))),
        message,
    )


def test_fused_shared_experts_and_wide_models_of_sglang(tmp_path: Path) -> None:
    """Nine experts with the shared one, or a model with more than the recorder's eight."""
    w.sglang_records(tmp_path / "token.pt", [(2, IDS)], SHAPE, MAP, True)
    value = torch.load(tmp_path / "token.pt")
    value["records"][0]["topk_ids_of_layer"][:, :, 3] = 1
    torch.save(value, tmp_path / "fused.pt")
    refused(tmp_path / "fused.pt", "top-k is not the model's.*expected 3 experts per token, found 4 of 8")
    refused(tmp_path / "token.pt", "top-k is not the model's", MoeShape(6, SHAPE.layers, 16, 10))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda r: r["topk_ids_of_layer"].__setitem__((2, 0, 0), 10),
            "out of range.*record 0.*expected -1..9, found -1..10",
        ),
        (lambda r: r["topk_ids_of_layer"].__setitem__((2, 0, 0), -7), "out of range"),
        (lambda r: r["topk_ids_of_layer"].__setitem__((2, 0, 1), r["topk_ids_of_layer"][2, 0, 0].item()), "twice"),
        (lambda r: r["topk_ids_of_layer"].__setitem__((2, 0), -1), "part of a token's routing"),
        (lambda r: r["input_ids"].append(0), "lost tokens.*expected 10.*found 9"),
        (lambda r: r.update(topk_ids_of_layer=[1, 2]), "expected a tensor"),
        (lambda r: r.update(topk_ids_of_layer=torch.zeros(5, 9, 8, dtype=torch.int32)), "wrong shape"),
        (lambda r: r.update(topk_ids_of_layer=r["topk_ids_of_layer"].float()), "wrong shape.*float32"),
    ],
)
def test_records_of_sglang_that_cannot_be_true(tmp_path: Path, change: Callable[[Any], Any], message: str) -> None:
    path = w.sglang_records(tmp_path / "token.pt", [(2, IDS)], SHAPE, MAP, True)
    value = torch.load(path)
    change(value["records"][0])
    torch.save(value, path)
    refused(path, message)


def test_maps_and_counts_of_sglang_that_do_not_fit(tmp_path: Path) -> None:
    path = w.sglang_records(tmp_path / "pass.pt", [(0, IDS)], SHAPE, MAP, False)
    value = torch.load(path)
    for key, wrong, message in (
        ("last_physical_to_logical_map", torch.tensor(MAP) + 1, "names experts that the model lacks.*0..7, found 1..8"),
        ("last_physical_to_logical_map", torch.tensor(MAP[:, :9]), "global_physical_count has the wrong shape"),
        ("last_physical_to_logical_map", torch.zeros(3), "map has the wrong shape"),
        ("records", [7], "a record is no dict"),
        ("records", [], "nothing was recorded"),
    ):
        torch.save(value | {key: wrong}, path)
        refused(path, message)


# Counts that cannot be true


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (COUNTS * 0, "nothing was recorded"),
        (changed(COUNTS, 1, 0), "layer with experts has recorded nothing.*layer 3"),
        (changed(COUNTS, (0, 0), -1), "negative or not finite.*found -1"),
        (changed(COUNTS.astype(float), (0, 0), np.nan), "negative or not finite.*nan"),
        (changed(COUNTS.astype(float), (0, 0), np.inf), "negative or not finite.*inf"),
        (COUNTS / COUNTS.sum(), "not whole numbers.*found 0.0"),
        ((COUNTS * 2.0**24).astype(np.float32), "too large to be exact.*at most 16,777,216 in float32"),
        (COUNTS * 2**48, "too large to be true"),
        (np.stack([COUNTS * 2**59] * 16), "too large to be true"),
        (changed(COUNTS, (0, 0), COUNTS[0, 0] + 3), "different numbers of tokens.*30 routed in layer 2, 27 in layer 3"),
        (COUNTS[:, :7], r"wrong shape.*8 experts\], found \[4, 7\]"),
        (COUNTS[:3], "wrong number of layers.*expected 6 in all, or the 4 with experts.*found 3"),
        (np.concatenate([COUNTS, COUNTS[:2]]), "a dense layer has routed tokens"),
        (np.full((4, 8), 5), "no whole number of tokens.*40 routed per layer, top-3"),
        (changed(COUNTS * 0, (slice(None), 0), 27), "impossible traffic counts"),
        (COUNTS > 3, "not numbers.*bool"),
    ],
)
def test_counts_that_cannot_be_true(tmp_path: Path, counts: np.ndarray, message: str) -> None:
    torch.save(torch.tensor(counts), tmp_path / "kt.pt")
    refused(tmp_path / "kt.pt", message)
    torch.save({"rank": 0, "logical_count": torch.tensor(counts)}, tmp_path / "stat.pt")
    refused(tmp_path / "stat.pt", message)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 3), st.integers(0, 7), st.integers(-(2**62), 2**62).filter(bool))
def test_no_changed_count_passes(tmp_path_factory: pytest.TempPathFactory, layer: int, expert: int, by: int) -> None:
    path = tmp_path_factory.mktemp("captures") / "kt.pt"
    torch.save(torch.tensor(changed(COUNTS, (layer, expert), COUNTS[layer, expert] + by)), path)
    with pytest.raises(TraceError):
        read_capture(path, SHAPE)


def test_statistics_of_vllm_exl3_written_within_a_step(tmp_path: Path) -> None:
    cut = COUNTS.copy()
    cut[2:] -= w.plain_counts(IDS[:1], 8)[2:]
    path = w.exl3_stats(tmp_path / "expert_stats.pt", cut, COUNTS, SHAPE)
    refused(path, "different numbers of tokens.*between two steps and not within one")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["model.layers.2.mlp", "model.layers.3.mlp"], r"wrong number of layers.*expected 4 \(layers 2-5\), found 2"),
        ([f"model.layers.{i}.mlp" for i in (2, 3, 4, 9)], r"wrong number of layers.*found 4 \(layers 2-4, 9\)"),
        (["a.layers.2.mlp", "b.layers.2.mlp"], "cannot be placed.*b.layers.2"),
        (["model.layers.2.mlp", "140251"], "cannot be placed.*140251"),
    ],
)
def test_layer_names_of_vllm_exl3_that_do_not_fit(tmp_path: Path, names: list[str], message: str) -> None:
    path = tmp_path / "expert_stats.pt"
    torch.save({name: torch.ones(2, 8, dtype=torch.float64) for name in names}, path)
    refused(path, message)


def test_importance_matrices_that_do_not_fit(tmp_path: Path) -> None:
    tensors = w.imatrix_tensors(COUNTS, SHAPE)
    one = "blk.3.ffn_up_exps.weight.counts"
    missing = {name: tensor for name, tensor in tensors.items() if "blk.3." not in name}
    path = tmp_path / "imatrix.gguf"
    for content, message in (
        (w.gguf_bytes(missing), r"wrong number of layers.*\(layers 2-5\), found 3 \(layers 2, 4-5\)"),
        (w.gguf_bytes(tensors | {one: tensors[one] + 1}), "projections are counted differently.*blk.3.ffn_up"),
        (
            w.gguf_bytes({name: t[:1] if "blk.3." in name else t for name, t in tensors.items()}),
            "different numbers of e",
        ),
        (w.gguf_bytes({name: t for name, t in tensors.items() if "exps" not in name}), "counts no experts"),
        (w.gguf_bytes(tensors | {one: tensors[one].reshape(2, 4)}), r"counts of another kind.*\[4, 2\]"),
        (w.gguf_bytes(tensors, kind="model"), "no importance matrix.*found 'model'"),
        (w.gguf_bytes(tensors, version=1), "not a GGUF file"),
        (struct.pack("<ii", 1, 28) + b"blk.0.ffn_gate_exps.weight" + bytes(40), "old format.*--output-format gguf"),
    ):
        path.write_bytes(content)
        refused(path, message)


# Damage


FILES = [
    "ids.npy",
    "ids.npz",
    "ids.b64",
    "kt.pt",
    "old.pt",
    "token.pt",
    "stats.pt",
    "imatrix.gguf",
    "a.jsonl",
    "a.jsonl.gz",
]


def a_capture(path: Path) -> Path:
    """Writes the one of FILES that the name says."""
    match path.name:
        case "ids.npy":
            np.save(path, IDS)
        case "ids.npz":
            np.savez(path, ids=IDS)
        case "ids.b64":
            path.write_text(w.npy_base64(IDS))
        case "kt.pt" | "old.pt" as name:
            torch.save(torch.tensor(COUNTS), path, _use_new_zipfile_serialization=name == "kt.pt")
        case "token.pt":
            w.sglang_records(path, [(1, IDS)], SHAPE, MAP, True)
        case "stats.pt":
            w.exl3_stats(path, COUNTS, COUNTS, SHAPE)
        case "imatrix.gguf":
            path.write_bytes(w.gguf_bytes(w.imatrix_tensors(COUNTS, SHAPE)))
        case "a.jsonl":
            w.json_lines(path, w.vllm_021_answer(IDS, 4), w.vllm_answer(IDS, 4))
        case _:
            path.write_bytes(gzip.compress(json.dumps(w.vllm_answer(IDS, 4)).encode(), mtime=0))
    return path


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([name for name in FILES if name != "a.jsonl"]), st.data())
def test_files_cut_anywhere_are_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    path = a_capture(tmp_path_factory.mktemp("cut") / name)
    read_capture(path, SHAPE)
    # Padding behind the last tensor may go.
    size = path.stat().st_size - (64 if name == "imatrix.gguf" else 0)
    os.truncate(path, data.draw(st.integers(0, size - 1)))
    with pytest.raises(TraceError, match=path.name):
        read_capture(path, SHAPE)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FILES), st.integers(0), st.integers(1, 255))
def test_a_flipped_byte_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, place: int, flip: int
) -> None:
    """Most formats have no checksum, so some flips go unseen; none ends in another error."""
    path = a_capture(tmp_path_factory.mktemp("flip") / name)
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= flip
    path.write_bytes(content)
    try:
        assert read_capture(path, SHAPE).tokens > 0
    except TraceError as error:
        assert path.name in str(error)


@settings(max_examples=100, deadline=None)
@given(
    st.binary(max_size=120),
    st.sampled_from([b"", b"GGUF\x03\0\0\0", b"\x93NUMPY\x01\0", b"PK\x03\x04", b'{"', b"\x80\x02", b"\x1f\x8b"]),
)
def test_random_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, tail: bytes, head: bytes) -> None:
    path = tmp_path_factory.mktemp("random") / "capture"
    path.write_bytes(head + tail)
    with pytest.raises(TraceError):
        read_capture(path, SHAPE)


class Runs:
    """What a malicious pickle looks like."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self.target,))


def test_pickles_are_not_run(tmp_path: Path) -> None:
    target = tmp_path / "ran"
    torch.save({"rank": 0, "logical_count": Runs(target)}, tmp_path / "new.pt")
    torch.save({"records": [Runs(target)]}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps(Runs(target), protocol=2))
    np.save(tmp_path / "objects.npy", np.array([Runs(target)], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "objects.npz", ids=np.array([Runs(target)], dtype=object))
    refused(tmp_path / "new.pt", "a pickle that may run code is not opened.*touch|getattr|pathlib")
    for name in ("old.pt", "plain.pkl", "objects.npy", "objects.npz"):
        refused(tmp_path / name, "may run code|cut or damaged")
    assert not target.exists()


def test_a_refused_pickle_is_refused_in_one_sentence(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """torch warns of old and new pickle protocols, and writes a page of advice."""
    for protocol in (2, 4):
        path = tmp_path / f"{protocol}.pkl"
        path.write_bytes(pickle.dumps(Runs(tmp_path / "ran"), protocol=protocol))
        with pytest.raises(TraceError, match="may run code.*found Unsupported (global|operand)") as caught:
            read_capture(path, SHAPE)
        assert not any(word in str(caught.value) for word in ("http", "file an issue", "documentation"))
    assert not recwarn.list


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a capture is empty"),
        (b"hello", "format of a capture is not recognised"),
        (b'{"choices": [{"message": {}}]}', "no answer with routing"),
        (b'{"choices": [{"routed_experts": "%%%"}]}', "base64 that is cut"),
        (b'{"choices": [{"routed_experts": "AAAA"}]}', "not a .npy array"),
        (b'{"choices": [{"routed_experts": 7}]}', "unknown form"),
        (b'{"choices": [{"routed_experts": [[[1, 2, 3]], [[1, 2]]]}]}', "no array"),
        (b'{"choices": [{"routed_experts": [[1, 2]]}]}', "wrong shape"),
        (b'{"choices": [{"routed_experts": {"data": "AAAA", "dtype": "object", "shape": [1]}}]}', "unknown form"),
        (b'{"choices": [{"routed_experts": {"data": "AAAA", "dtype": "int8", "shape": [1, 4, 3]}}]}', "cut or damaged"),
        (b'{"choices": [{"routed_experts": "nrlre1:int8:1x4x3:AAAA"}]}', "cut or damaged.*expected 12 B"),
        (b'{"meta_info": {"routed_experts": "AAAAAAAA"}}', "no whole number of tokens.*6 layers, top-3.*found 6 B"),
        (b'{"choices": [{"routed_experts": [[[99999999999999999999999]]]}]}', "not integers|wrong shape"),
        (b'{"choices": [{"routed_experts": {"data": "~~", "encoding": "base85"}}]}', "base85 that is cut"),
        (b'{"response": "{"}', "an answer is not JSON"),
        (b"[1\n", "not JSON"),
    ],
)
def test_answers_that_are_none(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    refused(tmp_path / "a.jsonl", message)


def test_answers_with_a_wrong_number_of_rows(tmp_path: Path) -> None:
    """Each token but the last sampled one has a row (vLLM PR 51906 may cut the front, if the request asked so)."""
    short = w.vllm_answer(IDS, 4) | {"usage": w.usage(4, 9)}
    refused(w.json_lines(tmp_path / "a.jsonl", short), "wrong number of routing rows.*expected 12, found 9")
    old = w.vllm_021_answer(IDS, 4) | {"usage": w.usage(5, 5)}
    refused(w.json_lines(tmp_path / "b.jsonl", old), "line 1, prompt.*expected 5, found 4")
    old = w.vllm_021_answer(IDS, 4) | {"usage": w.usage(4, 7)}
    refused(w.json_lines(tmp_path / "c.jsonl", old), "choice 0.*expected 6 or 7, found 5")
    two = w.vllm_answer(IDS, 4)
    two = {"choices": two["choices"] * 2}
    refused(
        w.json_lines(tmp_path / "d.jsonl", two), "choice 1.*several choices without|several choices without.*choice 1"
    )


@pytest.mark.parametrize("key", ["prompt_tokens", "completion_tokens", "cached_tokens"])
def test_a_negative_number_of_tokens(tmp_path: Path, key: str) -> None:
    usage = w.usage(4, 6, 1)
    (usage if key in usage else usage["prompt_tokens_details"])[key] = -3
    refused(w.json_lines(tmp_path / "a.jsonl", w.vllm_answer(IDS, 4) | {"usage": usage}), rf"negative.*{key}.*-3")
    meta = {"prompt_tokens": 4, "completion_tokens": 6, "cached_tokens": 0, key: -1, "routed_experts": "AAAA"}
    refused(w.json_lines(tmp_path / "b.jsonl", {"meta_info": meta}), rf"negative.*line 1, {key}.*-1")


# Several files, formats, models


def test_the_line_of_a_bad_answer_is_named(tmp_path: Path) -> None:
    bad = w.vllm_answer(changed(IDS, (5, 2), 0), 4)
    refused(w.json_lines(tmp_path / "a.jsonl", w.vllm_answer(IDS, 4), bad), "line 2, choice 0, layer 4, row 5")
    (tmp_path / "b.jsonl").write_text(json.dumps(w.vllm_answer(IDS, 4)) + "\n{oops\n")
    refused(tmp_path / "b.jsonl", "line 2.*not JSON|not JSON.*line 2")
    refused(
        w.json_lines(tmp_path / "c.jsonl", w.vllm_answer(IDS, 4), w.sglang_answer(IDS, SHAPE, 4)),
        "another engine.*line 2.*sglang",
    )


def test_captures_of_two_models(tmp_path: Path) -> None:
    other = MoeShape(6, SHAPE.layers, 12, 3)
    one = w.json_lines(tmp_path / "one.jsonl", w.vllm_answer(IDS, 4))
    two = w.sglang_stat(tmp_path / "two.pt", np.ones((1, 4, 12), int), other)
    with pytest.raises(TraceError, match=r"two\.pt.*8 experts\], found \[3, 6, 12\]"):
        read_captures([one, two], SHAPE)
    table = TrafficTable(COUNTS, 9, (0, 1, 2, 3), 3)
    table.save(tmp_path / "traffic.safetensors")
    refused(tmp_path / "traffic.safetensors", "table of another model")


def test_the_same_traffic_given_twice(tmp_path: Path) -> None:
    """Both ranks of a tensor-parallel pair record every token."""
    ids = w.random_ids(SHAPE, 100)
    paths = [w.sglang_records(tmp_path / f"{rank}.pt", [(0, ids)], SHAPE, MAP, False) for rank in range(2)]
    with pytest.raises(TraceError, match=r"given twice.*1\.pt.*same counts everywhere as.*0\.pt.*one rank's file"):
        read_captures(paths, SHAPE)


def test_the_uneven_file_of_several_is_named(tmp_path: Path) -> None:
    good = w.sglang_stat(tmp_path / "good.pt", COUNTS[None], SHAPE)
    bad = w.exl3_stats(tmp_path / "bad.pt", changed(COUNTS, (0, 0), COUNTS[0, 0] + 3), COUNTS, SHAPE)
    with pytest.raises(TraceError, match=r"different numbers of tokens.*bad\.pt"):
        read_captures([good, bad], SHAPE)


def test_formats_and_files_that_are_none(tmp_path: Path) -> None:
    path = w.json_lines(tmp_path / "a.jsonl", w.vllm_answer(IDS, 4))
    refused(path, "in another format.*expected imatrix, found vllm", form="imatrix")
    torch.save({"state_dict": torch.ones(2)}, tmp_path / "model.pt")
    refused(tmp_path / "model.pt", "no known capture.*found dict with .*state_dict")
    refused(tmp_path / "model.pt", "not a file of SGLang's recorder", form="sglang-recorder")
    refused(tmp_path / "model.pt", "not vllm-exl3's", form="vllm-exl3")
    refused(tmp_path / "model.pt", "not kTransformers'", form="ktransformers")
    torch.save(torch.ones(4, 8, dtype=torch.bfloat16), tmp_path / "bf16.pt")
    refused(tmp_path / "bf16.pt", "holds no counts.*bfloat16")
    refused(tmp_path, "there is no such capture")
    with pytest.raises(TraceError, match="no such capture format.*vllm, sglang"):
        read_capture(path, SHAPE, "tensorrt")
    with pytest.raises(TraceError, match="no capture to read"):
        read_captures([], SHAPE)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"[]", "not an object"),
        (b'{"num_hidden_layers": 4}', "does not say how.*n_routed_experts"),
        (b'{"num_hidden_layers": 4, "num_experts": 8}', "num_experts_per_tok"),
        (b'{"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 9}', "no mixture"),
        (b'{"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2, "moe_layers": []}', "no mixture"),
    ],
)
def test_configs_without_experts(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        MoeShape.read(tmp_path)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("prefill", "decode", "message"),
    [
        (COUNTS, COUNTS, "more than the whole.*expert"),
        (changed(COUNTS, (0, 0), -1), None, "impossible"),
        (COUNTS[:2], None, "impossible"),
        (None, changed(COUNTS, (0, 0), COUNTS[0, 0] - 1), "decode.*found|do not add up"),
    ],
)
def test_phases_that_cannot_be_true(prefill: Any, decode: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        TrafficTable(COUNTS, 9, SHAPE.layers, 3, prefill, decode)


def test_captures_can_be_read_without_torch(tmp_path: Path) -> None:
    """All but .pt files: torch may be missing altogether."""
    path = w.json_lines(tmp_path / "a.jsonl", w.vllm_answer(IDS, 4))
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path; from moefit.placement.captures import MoeShape, read_capture\n"
        f"print(read_capture(Path({str(path)!r}), {SHAPE!r}).tokens)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "9\n", done.stderr
