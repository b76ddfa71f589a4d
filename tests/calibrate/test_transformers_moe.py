"""Every supported family, streamed layer by layer, against transformers' own `from_pretrained`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from moefit.calibrate.checkpoint import Checkpoint
from moefit.calibrate.families import open_model
from moefit.calibrate.family import Layer, Routed
from moefit.calibrate.stream import expert_forward, run_model
from moefit.calibrate.transformers_moe.layer import HIDDEN, TransformersLayer, aligned
from moefit.calibrate.transformers_moe.model import TransformersModel
from moefit.calibrate.transformers_moe.names import FAMILIES as ARCHITECTURES
from moefit.calibrate.transformers_moe.names import expert_names, sizes
from moefit.errors import CheckpointError, TraceError

from ..tiny_families import FAMILIES, fuse, reconfigure, rewrite, save_family

TOLERANCE = 1e-5
"""Largest difference of a logit, where logits have a standard deviation around 1.5: float32 sums in another order."""

LENGTHS = (70, 33, 33, 5)  # longer than every sliding window, and shorter than a compressed stretch


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    shards = {"olmoe": "60KB"}
    return {family: save_family(family, root / family, max_shard_size=shards.get(family, "1GB")) for family in FAMILIES}


def open_streamed(folder: Path) -> TransformersModel:
    model = open_model(Checkpoint.open(folder))
    assert isinstance(model, TransformersModel)
    return model


def whole(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def windows(vocabulary: int = 256, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    rng = torch.Generator().manual_seed(1)
    return [torch.randint(vocabulary, (length,), generator=rng) for length in lengths]


@torch.no_grad()
def largest_difference(
    model: TransformersModel, reference: PreTrainedModel, experts: Any = None, lengths: tuple[int, ...] = LENGTHS
) -> float:
    ids = windows(model.vocabulary, lengths)
    states = run_model(model, ids, 2, *([experts] if experts else []))
    found = [model.logits(state) for state in states]
    expected = [reference(input_ids=window[None]).logits[0] for window in ids]
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_from_pretrained(folders: dict[str, Path], family: str) -> None:
    model, reference = open_streamed(folders[family]), whole(folders[family])
    assert largest_difference(model, reference) < TOLERANCE

    def a_little_off(layer: Layer) -> Any:
        return lambda expert: tuple(weight * 1.01 for weight in layer.expert(expert))

    assert largest_difference(model, reference, a_little_off) > 100 * TOLERANCE


def test_a_trained_model(shared: Path) -> None:
    folder = shared / "models" / "tiny-qwen3-moe"
    assert largest_difference(open_streamed(folder), whole(folder), lengths=(40, 9)) < 1e-4  # logits up to 18


def test_fused_experts_and_a_vision_tower(folders: dict[str, Path], tmp_path: Path) -> None:
    """Qwen3.5-MoE as released: fused experts under `model.language_model.`, the text's configuration inside another."""
    folder = tmp_path / "released"
    shutil.copytree(folders["qwen3_5_moe_text"], folder)

    def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        inner = {name.replace("model.", "model.language_model."): tensor for name, tensor in fuse(tensors).items()}
        return inner | {"model.visual.patch_embed.proj.weight": torch.ones(2), "mtp.fc.weight": torch.ones(2)}

    rewrite(folder, rename)
    reconfigure(
        folder,
        lambda config: {
            "architectures": ["Qwen3_5MoeForConditionalGeneration"],
            "model_type": "qwen3_5_moe",
            "text_config": config,
            "image_token_id": 200,
            "tie_word_embeddings": False,
        },
    )
    model = open_streamed(folder)
    assert model.names.fused and model.names.layer_prefix(1) == "model.language_model.layers.1."
    ids = [torch.arange(40)]
    with torch.no_grad():
        found = model.logits(run_model(model, ids, 1)[0])
        expected = whole(folders["qwen3_5_moe_text"])(input_ids=ids[0][None]).logits[0]
    assert (found - expected).abs().max() < TOLERANCE
    assert model.banned == (200,)
    with pytest.raises(TraceError, match="image.*position 1"):
        model.check_ids(torch.tensor([3, 200]), "window 0")


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v4"])
def test_fused_and_single_experts_read_alike(folders: dict[str, Path], family: str) -> None:
    """w1 is the gate, w3 the upper half, whatever they are called on disk."""
    layer = open_streamed(folders[family]).load_layer(1)
    experts = whole(folders[family]).model.layers[1].mlp.experts
    w1, w3, w2 = layer.expert(4)
    assert torch.equal(torch.cat([w1, w3]), experts.gate_up_proj[4])
    assert torch.equal(w2, experts.down_proj[4])


def test_kept_experts_are_read_once(folders: dict[str, Path], tmp_path: Path) -> None:
    """As on a card, where an expert's bytes stay."""
    folder = tmp_path / "fused"
    shutil.copytree(folders["qwen3_5_moe_text"], folder)
    rewrite(folder, fuse)
    single, fused = (open_streamed(path).load_layer(1) for path in (folders["qwen3_5_moe_text"], folder))
    kept = [dict[str, Tensor]() for _ in (single, fused)]
    single._kept, fused._kept = kept
    for expert in (0, 5, 0):
        for a, b in zip(single.expert(expert), fused.expert(expert), strict=True):
            assert torch.equal(a, b)
    assert [len(found) for found in kept] == [6, 6]
    (folder / "model.safetensors").unlink()
    fused.expert(5)


def routed_in_graph(layer: TransformersLayer, routed: Routed) -> Tensor:
    """Every expert on every token, in one graph."""
    output = torch.zeros_like(routed.x)
    for expert in range(layer.experts):
        share = (routed.topk_weights * (routed.topk_ids == expert)).sum(1, keepdim=True)
        output = output + share * expert_forward(routed.x, layer.expert(expert), layer.activation)
    return output


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5_moe_text", "deepseek_v4"])
def test_gradients_are_those_of_the_whole_model(folders: dict[str, Path], family: str) -> None:
    """At the embedding (through everything), and at each layer's routed experts, by autograd and `output_gradient`."""
    model, reference = open_streamed(folders[family]), whole(folders[family])
    ids = windows(lengths=(41,))[0]
    direction = torch.randn(41, 256, generator=torch.Generator().manual_seed(2))

    expected: dict[int, Tensor] = {}
    for index, block in enumerate(reference.model.layers):
        if hasattr(block.mlp, "experts"):

            def keep(module: Any, args: Any, output: Tensor, index: int = index) -> None:
                output.register_hook(lambda gradient: expected.update({index: gradient}))

            block.mlp.experts.register_forward_hook(keep)
    embedded = reference.get_input_embeddings()(ids[None]).detach().requires_grad_()
    reference.get_input_embeddings().register_forward_hook(lambda *_: embedded)
    (reference(input_ids=ids[None]).logits[0] * direction).sum().backward()
    assert embedded.grad is not None

    state = model.embed(ids)
    start = state[HIDDEN].requires_grad_()
    state = {HIDDEN: start}
    steps: list[tuple[TransformersLayer, Routed, Tensor, dict[str, Tensor]]] = []
    for index in range(model.layers):
        layer = model.load_layer(index)
        with torch.no_grad():
            chosen = layer.before_experts({HIDDEN: state[HIDDEN].detach()}, ids).topk_ids
        routed = layer.before_experts(state, ids, chosen)
        output = routed_in_graph(layer, routed)
        state = layer.after_experts(routed.state, output)
        state[HIDDEN].retain_grad()
        steps.append((layer, routed, output, state))
        if layer.experts:
            output.retain_grad()
    (model.logits(state) * direction).sum().backward()

    total = start.grad
    assert total is not None
    total = total.sum(1) if total.dim() == 3 else total  # DeepSeek-V4's streams are copies of one embedding
    assert torch.allclose(total, embedded.grad[0], rtol=1e-4, atol=1e-5 * float(embedded.grad.abs().max()))
    assert [layer.index for layer, *_ in steps if layer.experts] == sorted(expected)
    for layer, routed, output, behind in steps:
        gradient = behind[HIDDEN].grad
        assert gradient is not None
        found = layer.output_gradient(layer.kept(routed.state), {HIDDEN: gradient.unsqueeze(0)})
        if not layer.experts:
            assert found.shape == (1, 41, 0)
            continue
        scale = float(expected[layer.index].abs().max())
        assert output.grad is not None
        assert torch.allclose(output.grad, expected[layer.index], rtol=1e-4, atol=1e-5 * scale)
        assert torch.allclose(found[0], output.grad, rtol=1e-6, atol=1e-7 * scale)


def test_dense_layers_hand_the_state_through(folders: dict[str, Path]) -> None:
    model = open_streamed(folders["deepseek_v3"])
    ids = windows()[1]
    layer = model.load_layer(0)
    routed = layer.before_experts(model.embed(ids), ids)
    assert layer.experts == 0 and layer.kept(routed.state) == {}
    assert routed.x.shape == routed.topk_ids.shape == routed.topk_weights.shape == (33, 0)
    assert routed.topk_ids.dtype == torch.int64
    assert layer.after_experts(routed.state, routed.x) == routed.state
    assert layer.next_ranks(routed.x, routed.topk_ids, 2).shape == (33, 0)


@pytest.mark.parametrize("family", ["qwen2_moe", "glm4_moe", "deepseek_v4"])
def test_next_ranks_follow_the_router(folders: dict[str, Path], family: str) -> None:
    """A router that may take twice as many takes the chosen and the next ranks."""
    model = open_streamed(folders[family])
    layer = model.load_layer(1)
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(3))
    gate = layer._router
    chosen = gate(x)[2]
    behind = layer.next_ranks(x, chosen, 2)
    gate.top_k = 4
    more = gate(x)[2]
    assert torch.equal(torch.cat([chosen, behind], 1).sort().values, more.sort().values)
    gate.top_k = 3
    assert torch.equal(torch.cat([chosen, behind[:, :1]], 1).sort().values, gate(x)[2].sort().values)
    assert layer.next_ranks(x, chosen, 99).shape == (50, 4)


def test_hash_routing_ranks_nothing(folders: dict[str, Path]) -> None:
    model = open_streamed(folders["deepseek_v4"])
    ids = windows()[0]
    layer = model.load_layer(0)
    routed = layer.before_experts(model.embed(ids), ids)
    assert torch.equal(routed.topk_ids, whole(folders["deepseek_v4"]).model.layers[0].mlp.gate.tid2eid[ids])
    assert layer.next_ranks(routed.x, routed.topk_ids, 2).shape == (70, 0)


def test_weights_follow_the_chosen_experts() -> None:
    weights = torch.tensor([[0.6, 0.4], [0.7, 0.3]], requires_grad=True)
    ids = torch.tensor([[3, 1], [0, 2]])
    found = aligned(weights, ids, torch.tensor([[1, 3], [0, 5]]))  # expert 5 tied with 2
    assert torch.equal(found, torch.tensor([[0.4, 0.6], [0.7, 0.3]]))
    found.sum().backward()
    assert torch.equal(weights.grad, torch.tensor([[1.0, 1.0], [1.0, 0.0]]))


def test_sizes_know_which_layers_have_experts(folders: dict[str, Path]) -> None:
    layers = {"qwen2_moe": (1, 3), "deepseek_v3": (1, 2), "glm4_moe": (1,), "deepseek_v4": (0, 1, 2, 3)}
    for family, expected in layers.items():
        found = expert_names(Checkpoint.open(folders[family])).sizes
        assert found.moe_layers == expected
        assert (found.hidden, found.intermediate, found.experts_per_token, found.vocabulary) == (64, 32, 2, 256)


def test_a_drafter_stays_out(folders: dict[str, Path], tmp_path: Path) -> None:
    """DeepSeek-V3 stores its drafter as one more layer, DeepSeek-V4 under `mtp.`; old releases store frequencies."""
    for family, extra in {
        "deepseek_v3": "model.layers.3.mlp.experts.0.gate_proj.weight",
        "deepseek_v4": "mtp.0.ffn.experts.0.w1.weight",
        "mixtral": "model.layers.0.self_attn.rotary_emb.inv_freq",
    }.items():
        folder = tmp_path / family
        shutil.copytree(folders[family], folder)
        rewrite(folder, lambda tensors, extra=extra: tensors | {extra: torch.ones(4)})
        assert not open_streamed(folder).names.owns(extra)


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        open_model(Checkpoint.open(folder), **options)
    return str(error.value)


def test_other_architectures_are_refused_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(folders["mixtral"], folder)
    for name, nearest in {
        "Qwen3ForCausalLM": "The nearest supported one is Qwen3MoeForCausalLM",
        "DeepseekV32ForCausalLM": "The nearest supported one is DeepseekV3ForCausalLM",
        "Qwen3MoeForCausalLm": "The nearest supported one is Qwen3MoeForCausalLM",
        "LlamaForCausalLM": "Give a checkpoint of one of these, by name the nearest is",
    }.items():
        reconfigure(folder, lambda config, name=name: config | {"architectures": [name]})
        message = refused(folder)
        assert f"found {name}" in message and nearest in message
        assert all(supported in message for supported in ("DeepseekV41ForCausalLM", *ARCHITECTURES))
    reconfigure(folder, lambda config: {key: value for key, value in config.items() if key != "architectures"})
    assert "found None" in refused(folder)


@pytest.mark.parametrize(
    ("family", "key", "value", "found"),
    [
        ("mixtral", "num_experts_per_tok", 7, "expected 1 to 6, found 7"),
        ("qwen3_moe", "decoder_sparse_step", 0, "expected 1 or more, found 0"),
        ("deepseek_v3", "n_group", 3, "expected a divisor of 8 with 2 experts or more each, found 3"),
        ("deepseek_v3", "n_group", 0, "expected a divisor of 8 with 2 experts or more each, found 0"),
        ("deepseek_v3", "n_group", 8, "expected a divisor of 8 with 2 experts or more each, found 8"),
        ("deepseek_v3", "topk_group", 5, "expected 1 to 4 for top-2, found 5"),
        ("glm4_moe", "topk_group", 0, "expected 1 to"),
        ("mixtral", "num_local_experts", -4, "expected layers with experts"),
        ("mixtral", "model_type", "deepseek_v3", "expected mixtral, found 'deepseek_v3'"),
    ],
)
def test_impossible_sizes_are_refused(
    folders: dict[str, Path], tmp_path: Path, family: str, key: str, value: Any, found: str
) -> None:
    folder = Path(shutil.copytree(folders[family], tmp_path / family))
    reconfigure(folder, lambda config: config | {key: value})
    message = refused(folder)
    assert f"config.json, {key}]: {found}" in message and "\n" not in message


def test_models_without_experts_are_refused() -> None:
    config = {"architectures": ["Qwen2MoeForCausalLM"]} | FAMILIES["qwen2_moe"]
    for change in ({"num_experts": 0}, {"mlp_only_layers": [0, 1, 2, 3]}):
        with pytest.raises(CheckpointError, match="no routed experts.*num_experts"):
            sizes(config | change)


def test_damage_names_the_tensor(folders: dict[str, Path], tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    norm = "model.norm.weight"

    def damaged(case: str, change: Any) -> str:
        folder = tmp_path / case
        shutil.copytree(folders["mixtral"], folder)
        rewrite(folder, change)
        return refused(folder)

    def without(tensors: dict[str, Tensor], missing: str) -> dict[str, Tensor]:
        return {key: value for key, value in tensors.items() if key != missing}

    assert name in damaged("missing", lambda tensors: without(tensors, name))
    assert norm in damaged("no norm", lambda tensors: without(tensors, norm))
    message = damaged("extra", lambda tensors: tensors | {"model.layers.1.self_attn.q_norm.weight": torch.ones(4)})
    assert "no place for" in message and "q_norm" in message
    message = damaged("shape", lambda tensors: tensors | {name: torch.ones(32, 64)})
    assert name in message and "expected [64, 64], found [32, 64]" in message
    experts = damaged("none", lambda tensors: {key: value for key, value in tensors.items() if "experts" not in key})
    assert "no routed experts" in experts and "model.layers.0.block_sparse_moe.experts.0.w1.weight" in experts


def test_an_expert_of_another_shape_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "qwen"
    shutil.copytree(folders["qwen3_5_moe_text"], folder)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    rewrite(folder, lambda tensors: tensors | {name: torch.ones(16, 64)})
    with pytest.raises(CheckpointError, match=r"experts\.2\.up_proj.*expected \[32, 64\], found \[16, 64\]"):
        open_streamed(folder).load_layer(1).expert(2)
    fused = "model.layers.1.mlp.experts.gate_up_proj"

    def cut(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        joined = fuse(tensors | {name: torch.ones(32, 64)})
        return joined | {fused: joined[fused][:, :48]}

    rewrite(folder, cut)
    with pytest.raises(CheckpointError, match=r"gate_up_proj.*at least 64, 64\], found F32 \[6, 48, 64\]"):
        open_streamed(folder).load_layer(1).expert(2)


def test_options_and_tokens_that_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    assert "DeepSeek-V4.1 only" in refused(folders["mixtral"], kv_quantization=True)
    model = open_model(Checkpoint.open(folders["mixtral"]), kv_quantization=None)
    assert not model.kv_quantization and model.banned == ()
    for ids in (torch.tensor([256]), torch.tensor([-1]), torch.tensor([1], dtype=torch.int32), torch.tensor([]).long()):
        with pytest.raises(TraceError):
            model.embed(ids)
    folder = tmp_path / "config"
    shutil.copytree(folders["mixtral"], folder)
    reconfigure(folder, lambda config: config | {"num_hidden_layers": "two"})
    assert "does not accept this configuration" in refused(folder)


def test_the_page_lists_every_architecture() -> None:
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    for name, family in ARCHITECTURES.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{name}`"))
        assert "the same" in row or "as above" in row or family.block in row


def test_mxfp4_experts_and_fp8_attention(folders: dict[str, Path], tmp_path: Path) -> None:
    """DeepSeek-V4 as released, against its decoded values as transformers reads them."""
    released, decoded = tmp_path / "released", tmp_path / "decoded"
    rng = torch.Generator().manual_seed(4)
    expert, attention = "layers.1.ffn.experts.3.w2", "layers.2.attn.wq_b"

    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 0x78, shape, generator=rng, dtype=torch.uint8)

    def scale(*shape: int) -> Tensor:
        return torch.randint(118, 122, shape, generator=rng, dtype=torch.uint8).view(torch.float8_e8m0fnu)

    stored = {
        f"{expert}.weight": codes(64, 16).view(torch.int8),
        f"{expert}.scale": scale(64, 1),
        f"{attention}.weight": codes(128, 32).view(torch.float8_e4m3fn),
        f"{attention}.scale": scale(1, 1),  # one block of 128x128
    }
    for folder in (released, decoded):
        shutil.copytree(folders["deepseek_v4"], folder)
    rewrite(released, lambda tensors: tensors | stored)
    checkpoint = Checkpoint.open(released)
    plain = {f"{name}.weight": checkpoint.weight(name) for name in (expert, attention)}
    rewrite(decoded, lambda tensors: tensors | plain)
    assert plain[f"{attention}.weight"].abs().max() > 0.1
    assert largest_difference(open_streamed(released), whole(decoded)) < 3 * TOLERANCE
    assert largest_difference(open_streamed(released), whole(folders["deepseek_v4"])) > 100 * TOLERANCE
