"""Every format: known routing written as the engine writes it, read back as the same counts."""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moefit.placement import TrafficTable
from moefit.placement.captures import MoeShape, detect, read_capture, read_captures

from . import writers as w

SHAPE = MoeShape(6, (2, 3, 4, 5), 8, 3)
"""Two dense layers, then four of eight experts, top-3."""


@st.composite
def routings(draw: st.DrawFn) -> tuple[MoeShape, np.ndarray]:
    """A model with some dense layers, and random top-k sets of it [tokens, L, k]."""
    experts = draw(st.integers(3, 12))
    hidden = draw(st.integers(1, 5))
    layers = sorted(draw(st.sets(st.integers(0, hidden - 1), min_size=1)))
    shape = MoeShape(hidden, tuple(layers), experts, draw(st.integers(2, min(8, experts))))
    return shape, w.random_ids(shape, draw(st.integers(2, 12)), draw(st.integers(0, 999)))


def expected(
    shape: MoeShape, ids: np.ndarray, prefill: np.ndarray | None = None, decode: np.ndarray | None = None
) -> Any:
    parts = [None if rows is None else w.plain_counts(rows, shape.experts) for rows in (prefill, decode)]
    return TrafficTable(w.plain_counts(ids, shape.experts), len(ids), shape.layers, shape.top_k, *parts)


def counts_of(path: Path, shape: MoeShape, form: str | None = None) -> TrafficTable:
    """Without windows: test_captures_recorded.py is about them."""
    return replace(read_capture(path, shape, form), windows={}, source_windows={})


@settings(max_examples=25, deadline=None)
@given(routings(), st.data())
def test_every_format_gives_the_counts_of_a_plain_loop(
    tmp_path_factory: pytest.TempPathFactory, routing: tuple[MoeShape, np.ndarray], data: st.DataObject
) -> None:
    """What tells phases apart keeps them apart; prompt | generated is cut at a random place."""
    shape, ids = routing
    folder = tmp_path_factory.mktemp("captures")
    cut = data.draw(st.integers(1, len(ids)))
    prompt, generated = ids[:cut], ids[cut:]
    counts = w.plain_counts(ids, shape.experts)
    plain, split = expected(shape, ids), expected(shape, ids, prompt, generated)
    mapping = w.expert_map(shape, data.draw(st.integers(0, 3)))
    steps = [(1, prompt), (4, ids[:0]), (2, generated)]

    np.save(folder / "ids.npy", ids.astype(np.uint8))
    np.savez(folder / "ids.npz", first=prompt.astype(np.int16), second=generated.astype(np.int16))
    (folder / "ids.b64").write_text(w.npy_base64(ids))
    torch.save(torch.tensor(counts), folder / "kt.pt")
    torch.save({"logical_count": torch.tensor(w.all_layers(counts, shape, 0)).double()}, folder / "kt-dict.pt")
    torch.save(torch.tensor(counts)[None].float(), folder / "kt-old.pt", _use_new_zipfile_serialization=False)
    (folder / "imatrix.gguf").write_bytes(w.gguf_bytes(w.imatrix_tensors(counts, shape)))
    split.save(folder / "traffic.safetensors")
    halves = np.stack([w.plain_counts(half, shape.experts) for half in (prompt, generated)])
    envelope = {"shape": list(ids.shape), "dtype": "int16", "data": w.raw_base64(ids, "int16"), "start": 0}
    sizes = "x".join(map(str, ids.shape))
    gateway = {"request": json.dumps({"model": "m"}), "response": json.dumps(w.vllm_answer(ids, cut))}
    cases = {
        folder / "ids.npy": ("vllm", plain),
        folder / "ids.npz": ("vllm", plain),
        folder / "ids.b64": ("vllm", plain),
        w.json_lines(folder / "lists.json", ids.tolist()): ("vllm", plain),
        w.json_lines(folder / "022.jsonl", w.vllm_answer(ids, cut)): ("vllm", split),
        w.json_lines(folder / "021.jsonl", w.vllm_021_answer(ids, cut)): ("vllm", split),
        w.json_lines(folder / "log.jsonl", gateway): ("vllm", split),
        w.json_lines(folder / "dynamo.jsonl", w.vllm_answer(ids, cut, routed=envelope)): ("vllm", split),
        w.json_lines(
            folder / "nemo.jsonl", w.vllm_answer(ids, cut, routed=f"nrlre1:int32:{sizes}:{w.raw_base64(ids)}")
        ): ("vllm", split),
        w.json_lines(folder / "sglang.jsonl", w.sglang_answer(ids, shape, cut)): ("sglang", split),
        w.sglang_stat(folder / "stat.pt", halves, shape): ("sglang-recorder", plain),
        w.sglang_records(folder / "pass.pt", steps, shape, mapping, False): ("sglang-recorder", plain),
        w.sglang_records(folder / "token.pt", steps, shape, mapping, True): ("sglang-recorder", split),
        folder / "kt.pt": ("ktransformers", plain),
        folder / "kt-dict.pt": ("ktransformers", plain),
        folder / "kt-old.pt": ("ktransformers", plain),
        folder / "imatrix.gguf": ("imatrix", plain),
        w.exl3_stats(folder / "expert_stats.pt", halves[1], halves[0], shape): ("vllm-exl3", split),
        folder / "traffic.safetensors": ("moefit", split),
    }
    for path, (form, table) in cases.items():
        assert detect(path).format == form, path
        assert counts_of(path, shape) == table, path
        assert counts_of(path, shape, form) == table, path


def test_several_files_are_summed_with_their_phases(tmp_path: Path) -> None:
    """imatrix tells no phase: its tokens are in the counts and in neither phase."""
    ids = [w.random_ids(SHAPE, tokens, tokens) for tokens in (5, 7, 9)]
    (tmp_path / "imatrix.gguf").write_bytes(
        w.gguf_bytes(w.imatrix_tensors(w.plain_counts(ids[0], SHAPE.experts), SHAPE))
    )
    paths = [
        tmp_path / "imatrix.gguf",
        w.json_lines(tmp_path / "a.jsonl", w.vllm_answer(ids[1], 4)),
        w.json_lines(tmp_path / "b.jsonl", w.sglang_answer(ids[2], SHAPE, 6)),
    ]
    table, files = read_captures(paths, SHAPE)
    prefill, decode = np.concatenate([ids[1][:4], ids[2][:6]]), np.concatenate([ids[1][4:], ids[2][6:]])
    assert replace(table, windows={}, source_windows={}) == expected(SHAPE, np.concatenate(ids), prefill, decode)
    assert table.phase_tokens == {"prefill": 10, "decode": 6}
    assert [(f.format, f.tokens, f.phase_tokens) for f in files] == [
        ("imatrix", 5, {}),
        ("vllm", 7, {"prefill": 4, "decode": 3}),
        ("sglang", 9, {"prefill": 6, "decode": 3}),
    ]


def test_rows_of_the_prefix_cache_are_not_counted_again(tmp_path: Path) -> None:
    """An agent's second request repeats the first: vLLM 0.21 gives rows of -1, later ones the old rows."""
    ids = w.random_ids(SHAPE, 9)
    later = w.json_lines(tmp_path / "later.jsonl", w.vllm_answer(ids, 6, cached=4))
    sglang = w.json_lines(tmp_path / "sglang.jsonl", w.sglang_answer(ids, SHAPE, 6, cached=4))
    marked = ids.copy()
    marked[:4] = -1
    old = w.json_lines(tmp_path / "old.jsonl", w.vllm_021_answer(marked, 6))
    for path in (later, sglang, old):
        table, files = read_captures([path], SHAPE)
        assert replace(table, windows={}, source_windows={}) == expected(SHAPE, ids[4:], ids[4:6], ids[6:]), path
        assert sum(files[0].left.values()) == 4


@pytest.mark.parametrize("start", [0, 3, 5])
def test_a_prefix_that_the_request_cut_off(tmp_path: Path, start: int) -> None:
    """Known from the logged request, or from the array's own envelope."""
    ids = w.random_ids(SHAPE, 9)
    data = base64.b85encode(ids[start:].astype("<i4").tobytes()).decode()
    envelope = {"data": data, "encoding": "base85", "dtype": "int32", "shape": [9 - start, 4, 3], "start": start}
    path = w.json_lines(tmp_path / "dynamo.jsonl", w.vllm_answer(ids, 5, routed=envelope))
    assert counts_of(path, SHAPE) == expected(SHAPE, ids[start:], ids[start:5], ids[5:])
    answer = w.vllm_answer(ids, 5) | {"choices": [{"routed_experts": w.npy_base64(ids[start:])}]}
    request = {"sampling_params": {"routed_experts_prompt_start": start}}
    path = w.json_lines(tmp_path / "log.jsonl", {"request": request, "response": answer})
    assert counts_of(path, SHAPE) == expected(SHAPE, ids[start:], ids[start:5], ids[5:])


def test_several_choices_share_their_prompt(tmp_path: Path) -> None:
    one, two = w.random_ids(SHAPE, 6, 1), w.random_ids(SHAPE, 8, 2)
    two[:4] = one[:4]
    answer = w.vllm_answer(one, 4)
    answer["choices"].append({"index": 1, "routed_experts": w.npy_base64(two)})
    path = w.json_lines(tmp_path / "two.jsonl", answer)
    whole = np.concatenate([one, two[4:]])
    assert counts_of(path, SHAPE) == expected(SHAPE, whole, one[:4], whole[4:])


def test_answers_of_sglang_s_openai_server_and_of_vllm_s_offline_api(tmp_path: Path) -> None:
    ids = w.random_ids(SHAPE, 7)
    native = w.sglang_answer(ids, SHAPE, 5)["meta_info"]["routed_experts"]
    openai = {"choices": [{}], "usage": w.usage(5, 3), "sglext": {"routed_experts": native}}
    offline = {
        "prompt_token_ids": list(range(5)),
        "outputs": [{"token_ids": [1, 2, 3], "routed_experts": ids.tolist()}],
    }
    for name, record in (("openai", openai), ("offline", offline)):
        path = w.json_lines(tmp_path / f"{name}.jsonl", record)
        assert counts_of(path, SHAPE) == expected(SHAPE, ids, ids[:5], ids[5:]), name


def test_gzip_indented_json_and_answers_without_routing(tmp_path: Path) -> None:
    ids = w.random_ids(SHAPE, 6)
    """Later vLLMs may still name 0.21's field."""
    preempted = {"choices": [{"routed_experts": None}], "usage": w.usage(3, 2)}
    records = [preempted, {"note": "not an answer"}, w.vllm_answer(ids, 4) | {"prompt_routed_experts": None}]
    (tmp_path / "a.json").write_text("\n" + json.dumps(records, indent=1))
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    for name in ("a.json", "b.jsonl.gz"):
        table, files = read_captures([tmp_path / name], SHAPE)
        assert replace(table, windows={}, source_windows={}) == expected(SHAPE, ids, ids[:4], ids[4:])
        assert files[0].left == {"answers without routing": 1}


def test_files_of_ranks_that_count_their_own_experts_add_up(tmp_path: Path) -> None:
    """DeepEP's low-latency dispatch: each rank's file alone is no whole number of tokens."""
    ids = w.random_ids(SHAPE, 11)
    counts = w.plain_counts(ids, SHAPE.experts)
    paths = []
    for rank in range(2):
        own = np.zeros_like(counts)
        own[:, rank * 4 : rank * 4 + 4] = counts[:, rank * 4 : rank * 4 + 4]
        value = {
            "records": [{"rank": rank, "global_physical_count": torch.tensor(w.all_layers(own, SHAPE, 0))}],
            "last_physical_to_logical_map": torch.arange(SHAPE.experts).repeat(SHAPE.hidden_layers, 1),
        }
        paths.append(tmp_path / f"expert_distribution_recorder_1_{rank}.pt")
        torch.save(value, paths[-1])
    assert read_captures(paths, SHAPE)[0] == expected(SHAPE, ids)
    with pytest.raises(Exception, match="different numbers of tokens.*all"):
        read_capture(paths[0], SHAPE)


def test_layers_of_the_drafter_are_left_out(tmp_path: Path) -> None:
    shape = MoeShape(6, SHAPE.layers, 8, 3, drafter_layers=1)
    counts = w.plain_counts(w.random_ids(shape, 9), shape.experts)
    tensors = w.imatrix_tensors(counts, shape) | {"blk.6.ffn_up_exps.weight.counts": np.ones((8, 1), np.float32)}
    (tmp_path / "imatrix.gguf").write_bytes(w.gguf_bytes(tensors))
    w.exl3_stats(tmp_path / "stats.pt", counts, counts * 0, shape)
    stats = torch.load(tmp_path / "stats.pt") | {"model.mtp.0.ffn.experts": torch.ones(2, 8)}
    torch.save(stats, tmp_path / "stats.pt")
    for name in ("imatrix.gguf", "stats.pt"):
        assert np.array_equal(read_capture(tmp_path / name, shape).counts, counts)


def test_gguf_written_by_llama_cpp_s_own_package(tmp_path: Path) -> None:
    """One layer, top-3 of 8, as `gguf.GGUFWriter` (gguf 0.19.0) lays out the keys and tensors of llama-imatrix."""
    path = tmp_path / "imatrix.gguf"
    path.write_bytes(gzip.decompress(base64.b64decode(GGUF_PACKAGE)))
    table = read_capture(path, MoeShape(1, (0,), 8, 3))
    assert table.counts.tolist() == [[5, 0, 7, 1, 4, 6, 2, 5]]
    assert table.tokens == 10


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_tables_with_phases_survive_their_file(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    ids = w.random_ids(SHAPE, 9, data.draw(st.integers(0, 99)))
    cut, end = sorted(data.draw(st.tuples(st.integers(0, 9), st.integers(0, 9))))
    table = expected(SHAPE, ids, ids[:cut], ids[end:])
    path = tmp_path_factory.mktemp("traffic") / "traffic.safetensors"
    table.save(path)
    assert TrafficTable.load(path) == table
    assert table.phase_tokens == {p: n for p, n in (("prefill", cut), ("decode", 9 - end)) if n}
    if not table.phases:
        assert table.to_bytes() == expected(SHAPE, ids).to_bytes()


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"num_experts": 8}, range(6)),
        ({"n_routed_experts": 8, "first_k_dense_replace": 2}, range(2, 6)),
        ({"n_routed_experts": 8, "first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4)),
        ({"n_routed_experts": 8, "moe_layer_freq": [0, 1, 1, 0, 1, 1]}, (1, 2, 4, 5)),
        ({"num_experts": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1, 5)),
        (
            {"num_local_experts": 8, "mlp_layer_types": ["dense", "hash_moe", "moe", "sparse", "dense", "moe"]},
            (1, 2, 3, 5),
        ),
        ({"num_local_experts": 8, "moe_layers": [0, 3]}, (0, 3)),
        ({"num_experts": 8, "expert_layer_period": 3, "expert_layer_offset": 1}, (1, 4)),
        ({"moe_num_experts": 8, "moe_layer_start_index": 1, "moe_layer_end_index": 4}, (1, 2, 3, 4)),
    ],
)
def test_layers_with_experts_by_config(config: dict[str, Any], layers: Any) -> None:
    text = {"num_hidden_layers": 6, "num_experts_per_tok": 2, **config}
    shape = MoeShape(6, tuple(layers), 8, 2)
    assert MoeShape.from_config(text) == shape
    assert MoeShape.from_config({"text_config": text}) == shape


def test_shapes_of_real_configs(tiny_v41: Path, shared: Path) -> None:
    assert MoeShape.read(tiny_v41) == MoeShape(6, tuple(range(6)), 32, 4, MoeShape.read(tiny_v41).drafter_layers)
    assert MoeShape.read(shared / "models/tiny-qwen3-moe/config.json") == MoeShape(6, tuple(range(6)), 32, 4)


GGUF_PACKAGE = """
H4sIAAAAAAACA9VQQW7CMBBcAmqpVAnUPqC0D7AQH2i4lGsvPQcTTLAIThRvRNpTnsJTeEqf0nWyotC0II4daTTyenY09mTy9tIGgCuo0WG9ZY
2UUZmMBb6nqkvna57rtcRMF/3jo5hLlFahvaGZs7f4vscayljPMok6MQILvP+xHi5zswrCJDfY4e27Xy1Wf6iqqgfwxI5ZvBJDsViYYJ5sTKCK
1IqN0tEShTaBzdcjr16o0IUmHs8nVd2sd/C0wyCftVkpkqguqTT9s1Ij6XSlLeugEZSnlxTasT6cyzldZz88Qvlcf55PLIlb4o746T50DNAnDo
hDok98JU6J6bj2Ojivyyl5F/zvu/+b/wUGMKucoAMAAA==
"""
