"""The quality harness: models with supplied experts, gradients at the projections, scores by the goldens' protocol."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # the benchmarks are scripts, not a package
try:
    import quality_baselines as baselines
    import quality_models as models
    import quality_score as scores
finally:
    sys.path.remove(str(BENCHMARKS))

from moefit.calibrate.checkpoint import Checkpoint  # noqa: E402
from moefit.errors import CheckpointError, FidelityError  # noqa: E402
from moefit.fidelity import TokenRows, WindowRow, compare, window_row  # noqa: E402
from moefit.quantize.linear import decode  # noqa: E402

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no card"))]
LENGTHS = (40, 25, 31)


@pytest.fixture(scope="module")
def qwen_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE of two layers, eight experts of 16 channels, of which one is never chosen in layer 0."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=8, num_experts_per_tok=3,
        norm_topk_prob=True, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("qwen")
    Qwen3MoeForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=["qwen", "v41"])
def model(request: pytest.FixtureRequest, qwen_path: Path, tiny_v41: Path) -> models.TinyModel:
    return models.load_model(qwen_path if request.param == "qwen" else tiny_v41)


def some_windows(model: models.TinyModel, lengths: tuple[int, ...] = LENGTHS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(15, model.vocabulary, (length,), generator=generator) for length in lengths]


def test_qwen_logits_equal_those_of_transformers(qwen_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    original = AutoModelForCausalLM.from_pretrained(qwen_path, dtype=torch.float32)
    model = models.load_model(qwen_path)
    windows = some_windows(model)
    with torch.no_grad():
        found = list(model.logits(windows, model.experts_from(model.weights), batch=2))
        expected = [original(window[None]).logits[0] for window in windows]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_v41_logits_equal_the_golden_ones(shared: Path) -> None:
    golden = safetensors.torch.load_file(shared / "golden" / "tiny_v41_logits.safetensors")
    model = models.load_model(shared / "models" / "tiny-v41")
    names = ["agentic50", "prose300"]
    with torch.no_grad():
        windows = [golden[f"{name}.ids"].long() for name in names]
        found = model.logits(windows, model.experts_from(model.weights))
    for name, logits in zip(names, found, strict=True):
        torch.testing.assert_close(logits, golden[f"{name}.logits"], rtol=0, atol=5e-5)


def test_padding_and_batches_do_not_show(model: models.TinyModel) -> None:
    windows, seen = some_windows(model), []
    run = model.experts_from(model.weights)

    def experts(layer: int, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        seen.append((layer, len(x)))
        return run(layer, x, ids, shares)

    with torch.no_grad():
        together = list(model.logits(windows, experts, batch=3))
        alone = list(model.logits(windows, run, batch=1))
    assert seen == [(layer, sum(LENGTHS)) for layer in range(model.layers)], "padding reached the experts"
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_grouped_experts_equal_a_loop_over_tokens(model: models.TinyModel) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(9, model.hidden, generator=generator)
    ids = torch.stack([torch.randperm(5, generator=generator)[:3] for _ in x])  # experts above 4 get nothing
    shares = torch.rand(9, 3, generator=generator)
    weights = model.original(0)
    found = models.run_experts(model, weights, x, ids, shares)
    for token, row in enumerate(found):
        expected = torch.zeros(model.hidden)
        for expert, share in zip(ids[token].tolist(), shares[token], strict=True):
            gate, up = (x[token] @ weights[name][expert] for name in ("gate", "up"))
            expected += share * (model.activation(gate, up) @ weights["down"][expert])
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("samples", [1, 2])
def test_captures_give_the_gradients_of_the_weights(model: models.TinyModel, samples: int) -> None:
    """x^T delta summed over batches is autograd's dL/dW; the tokens drawn do not depend on the batches."""
    windows = some_windows(model)
    weights = [{name: w.clone().requires_grad_() for name, w in layer.items()} for layer in model.weights]
    with torch.enable_grad():
        logits = torch.cat(list(model.logits(windows, model.experts_from(weights))))
    targets = models.sampled_tokens(logits, list(LENGTHS), samples, torch.Generator().manual_seed(4))
    found = [{name: torch.zeros(samples, *w.shape) for name, w in layer.items()} for layer in weights]
    tokens = 0
    for captures in models.backward_pass(model, windows, batch=2, samples=samples, seed=4):
        for (layer, expert), capture in captures.items():
            assert len(capture.tokens) == len(capture.x) == len(capture.topk_weight) > 0
            tokens += len(capture.x)
            found[layer]["gate"][:, expert] += capture.x.T @ capture.delta_gate
            found[layer]["up"][:, expert] += capture.x.T @ capture.delta_up
            found[layer]["down"][:, expert] += capture.a.T @ capture.delta_down
    assert tokens % (model.layers * sum(LENGTHS)) == 0
    for sample in range(samples):
        loss = F.cross_entropy(logits, targets[sample], reduction="sum")
        expected = torch.autograd.grad(loss, [w for layer in weights for w in layer.values()], retain_graph=True)
        for ours, theirs in zip([w for layer in found for w in layer.values()], expected, strict=True):
            torch.testing.assert_close(ours[sample], theirs, rtol=0, atol=2e-4 * float(theirs.abs().max()))
    if samples == 2:
        assert (targets[0] != targets[1]).any()


def test_captures_belong_to_their_tokens(model: models.TinyModel) -> None:
    windows, kept = some_windows(model), {}
    run = model.experts_from(model.weights)

    def experts(layer: int, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        kept[layer] = x, ids, shares
        return run(layer, x, ids, shares)

    with torch.no_grad():
        list(model.logits(windows, experts))
    (captures,) = models.backward_pass(model, windows)
    for (layer, expert), capture in captures.items():
        x, ids, shares = kept[layer]
        torch.testing.assert_close(capture.x, x[capture.tokens], rtol=1e-4, atol=1e-5)
        chosen = ids[capture.tokens] == expert
        assert chosen.sum(1).tolist() == [1] * len(chosen)
        torch.testing.assert_close(capture.topk_weight, shares[capture.tokens][chosen], rtol=1e-4, atol=1e-5)
    assert sum(len(c.tokens) for (layer, _), c in captures.items() if layer == 0) == kept[0][1].numel()


def test_sampled_tokens_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 2.0, -torch.inf, 1.0]])
    drawn = models.sampled_tokens(logits, [1], 20_000, torch.Generator().manual_seed(5))
    share = torch.bincount(drawn.flatten(), minlength=4) / drawn.numel()
    torch.testing.assert_close(share, logits[0].softmax(0), rtol=0, atol=0.015)
    assert share[2] == 0


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(CheckpointError, match="LlamaForCausalLM"):
        models.load_model(tmp_path)


@pytest.mark.parametrize("device", DEVICES[1:])
def test_the_card_computes_the_same(model: models.TinyModel, device: str, tiny_v41: Path, qwen_path: Path) -> None:
    other = models.load_model(tiny_v41 if model.name == tiny_v41.name else qwen_path, device)
    windows = some_windows(model, (300, 40))
    with torch.no_grad():
        here = list(model.logits(windows, model.experts_from(model.weights)))
        there = list(other.logits(windows, other.experts_from(other.weights)))
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=0, atol=2e-4)
    (first,), (second,) = (models.backward_pass(other, windows, samples=2, seed=6) for _ in range(2))
    for key, capture in first.items():
        assert torch.equal(capture.delta_gate, second[key].delta_gate), "not deterministic on one card"


# scores


def test_rows_equal_the_exact_comparison(model: models.TinyModel) -> None:
    windows = {"a": _windows(model, (40, 25)), "b": _windows(model, (31,))}
    rounded = [{name: baselines.rtn(w, group=16) for name, w in layer.items()} for layer in model.weights]
    scorer = scores.Scorer(model, windows, batch=2)
    found = scorer.score(rounded)
    assert found == scorer.score(model.experts_from(rounded))
    assert all(row.kl < 1e-6 and row.top1_hits == row.tokens for row in scorer.score(model.weights)["a"])
    for corpus, cut in windows.items():
        for row, window in zip(found[corpus], cut, strict=True):
            ids = torch.from_numpy(window.ids).long()
            with torch.no_grad():
                (before,), (after,) = (
                    model.logits([ids], model.experts_from(weights)) for weights in (model.weights, rounded)
                )
            exact: TokenRows = compare(before, after, ids)
            expected = window_row(window.document, exact)
            assert (row.document, row.tokens, row.top1_hits) == (window.document, len(ids), expected.top1_hits)
            for name in ("kl", "kl_squares", "reference_nll", "candidate_nll"):
                assert getattr(row, name) == pytest.approx(getattr(expected, name), rel=1e-3), name


def _windows(model: models.TinyModel, lengths: tuple[int, ...]) -> list[scores.Window]:
    cut = some_windows(model, lengths)
    return [scores.Window(ids.numpy().astype(np.int32), f"d{i}", "") for i, ids in enumerate(cut)]


def test_not_a_number_is_refused(model: models.TinyModel) -> None:
    scorer = scores.Scorer(model, {"a": _windows(model, (5,))})
    broken = [{name: w * torch.nan for name, w in layer.items()} for layer in model.weights]
    with pytest.raises(FidelityError, match="a/d0"):
        scorer.score(broken)


def _run(kls: dict[str, list[float]]) -> dict[str, list[WindowRow]]:
    return {
        corpus: [WindowRow(f"d{i}", 10, 10 * kl, 0.0, 9, 0.0, 0.0) for i, kl in enumerate(values)]
        for corpus, values in kls.items()
    }


def test_summary_is_the_mean_over_corpora_of_window_means() -> None:
    kl, top1 = scores.summary(_run({"a": [0.1, 0.3], "b": [0.6]}))
    assert kl.mean.value == pytest.approx(0.4)
    assert (kl.mean.low, kl.mean.high) == (pytest.approx(0.35), pytest.approx(0.45))  # both draws of "a" alike
    assert kl.corpora["a"].value == pytest.approx(0.2) and kl.corpora["b"].low == pytest.approx(0.6)
    assert top1.mean.value == pytest.approx(0.9)
    mean, _ = scores.summary([_run({"a": [0.1]}), _run({"a": [0.2]})])
    assert mean.mean.value == pytest.approx(0.15)


def test_paired_ratio_cancels_what_windows_share() -> None:
    values = {c: list(np.random.default_rng(i).lognormal(size=30)) for i, c in enumerate("abc")}
    half = _run({c: [v / 2 for v in vs] for c, vs in values.items()})
    ratio = scores.paired(_run(values), half)
    for interval in (ratio.mean, *ratio.corpora.values()):
        assert (interval.value, interval.low, interval.high) == pytest.approx((0.5, 0.5, 0.5))
    ratio = scores.paired(_run(values), [half, _run(values)])
    assert ratio.mean.value == pytest.approx(0.75)
    shuffled = {c: vs[::-1] for c, vs in values.items()}
    ratio = scores.paired(_run(values), _run(shuffled))
    assert ratio.mean.value == pytest.approx(1) and ratio.mean.low < 0.9 and ratio.mean.high > 1.1
    with pytest.raises(FidelityError, match="same windows"):
        scores.paired(_run(values), _run({**values, "c": values["c"][:-1]}))


def test_windows_are_the_protocols(shared: Path) -> None:
    from moefit.fidelity.score import read_held_out

    path = shared / "models" / "tiny-qwen3-moe"
    found = scores.evaluation(path, shared / "eval")
    expected = read_held_out(path, [shared / "eval" / f"{corpus}.jsonl" for corpus in found]).windows
    assert list(found) == ["prose", "code", "agentic"]
    for corpus, cut in found.items():
        assert [w.ids.tolist() for w in cut] == [w.ids.tolist() for w in expected[corpus]]
    traffic = [shared / "traffic" / f"traffic_{part}.jsonl" for part in ("calib", "plan")]
    assert [sum(map(len, scores.calibration_windows(path, traffic[:n]))) for n in (1, 2)] == [90_192, 181_447]


# baselines


def reference_gptq(weight: Tensor, hessian: Tensor, bits: int, group: int) -> Tensor:
    """One matrix, from the definition: a channel is rounded, then the later ones take their optimum given its error."""
    rest, quantized = weight.double().clone(), torch.empty_like(weight, dtype=torch.float64)
    for i in range(len(weight)):
        if i % group == 0:
            low, high = rest[i : i + group].amin(0), rest[i : i + group].amax(0)
            scale = (high - low) / (2**bits - 1)
        quantized[i] = ((rest[i] - low) / scale).round().clamp(0, 2**bits - 1) * scale + low
        later = slice(i + 1, None)
        move = torch.linalg.solve(hessian[later, later], hessian[later, i])  # [later]
        rest[later] += move[:, None] * (rest[i] - quantized[i])
    return quantized


def test_gptq_equals_its_definition() -> None:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(3, 32, 8, generator=generator)
    x = torch.randn(3, 100, 32, generator=generator) @ torch.randn(3, 32, 32, generator=generator)
    hessian = (x.mT @ x).double()
    found = baselines.gptq(weight, hessian, bits=3, group=16, damping=0.01)
    for w, h, q in zip(weight, hessian, found, strict=True):
        damped = h + 0.01 * h.diagonal().mean() * torch.eye(32)
        torch.testing.assert_close(q, reference_gptq(w, damped, 3, 16).float(), rtol=1e-3, atol=1e-3)
        errors = [torch.trace((w - r).double().T @ h @ (w - r).double()) for r in (q, baselines.rtn(w, 3, 16))]
        assert errors[0] < 0.6 * errors[1]


def test_gptq_without_correlation_is_rounding_to_nearest() -> None:
    weight = torch.randn(2, 32, 8, generator=torch.Generator().manual_seed(8))
    for hessian in (torch.eye(32).expand(2, 32, 32), torch.zeros(2, 32, 32)):
        torch.testing.assert_close(baselines.gptq(weight, hessian, group=16), baselines.rtn(weight, group=16))


def test_rtn_keeps_within_half_a_step_and_constants_whole() -> None:
    weight = torch.randn(32, 8, generator=torch.Generator().manual_seed(9))
    weight[:16, 0] = 0.7
    rounded = baselines.rtn(weight, bits=3, group=16)
    groups = weight.unflatten(0, (2, 16))
    step = (groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)) / 7
    assert ((rounded.unflatten(0, (2, 16)) - groups).abs() <= step / 2 + 1e-6).all()
    assert torch.equal(rounded[:16, 0], weight[:16, 0])
    assert all(len(column.unique()) <= 8 for column in rounded[:16].T)


# acceptance: the figures of shared/golden/README.md


@pytest.fixture(scope="module")
def qwen_scorer(shared: Path) -> Iterator[scores.Scorer]:
    path = shared / "models" / "tiny-qwen3-moe"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    yield scores.Scorer(models.load_model(path, device), scores.evaluation(path, shared / "eval"))


def check_figures(scorer: scores.Scorer, weights: list[models.Weights], kl: list[float], top1: list[float]) -> None:
    found_kl, found_top1 = scores.summary(scorer.score(weights))
    assert [v.value for v in found_kl.corpora.values()] == pytest.approx(kl, abs=6e-5)
    assert found_kl.mean.value == pytest.approx(sum(kl) / 3, abs=6e-5)
    assert [v.value for v in found_top1.corpora.values()] == pytest.approx(top1, abs=6e-4)


@pytest.mark.slow
def test_rounding_to_nearest_scores_as_published(qwen_scorer: scores.Scorer) -> None:
    rounded = [{name: baselines.rtn(w) for name, w in layer.items()} for layer in qwen_scorer.model.weights]
    check_figures(qwen_scorer, rounded, [0.2118, 0.1724, 0.2326], [0.773, 0.796, 0.849])


@pytest.mark.slow
def test_exllamav3s_own_pack_scores_as_published(shared: Path, qwen_scorer: scores.Scorer) -> None:
    model = qwen_scorer.model
    pack = Checkpoint.open(shared / "golden" / "exllamav3-tiny-qwen3-moe-3bpw")

    def linear(layer: int, expert: int, name: str) -> Tensor:
        prefix = f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj"
        return decode(*(pack.stored(f"{prefix}.{part}").numpy() for part in ("trellis", "suh", "svh")), "mul1")

    weights = [
        {
            name: torch.stack([linear(layer, expert, name) for expert in range(model.experts)]).to(model.device)
            for name in ("gate", "up", "down")
        }
        for layer in range(model.layers)
    ]
    check_figures(qwen_scorer, weights, [0.0804, 0.0668, 0.0927], [0.851, 0.870, 0.905])
