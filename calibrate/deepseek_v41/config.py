"""The text part of a DeepSeek-V4.1 config.json, checked field by field."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from ...errors import CheckpointError
from .kv_cache import BLOCK

# The rows of the release's key/value caches.
RELEASED_HEAD_DIM = 512
RELEASED_INDEX_HEAD_DIM = 128

# Fields that select arithmetic of which only one variant is implemented (and has goldens).
_ONLY_VALUE: dict[str, Any] = {
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "num_key_value_heads": 1,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class V41Config:
    """`text_config` of DeepSeek-V4.1, names as in config.json (YaRN's are lifted out of `rope_scaling`).

    Source: config.json of deepseek-ai/DeepSeek-V4.1-Flash.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    # attention
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    yarn_factor: float
    yarn_beta_fast: float
    yarn_beta_slow: float
    yarn_original_positions: int
    # compressed sparse attention; one ratio per backbone layer (drafter layers are cut off), 0 = window only
    compress_ratios: tuple[int, ...]
    kv_source_layer_ids: tuple[int, ...]
    index_source_layer_ids: tuple[int, ...]
    candidate_source_layer_id: int
    candidate_topk_blocks: int
    candidate_block_size: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    # hyper-connections
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    # experts
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    # Engram
    engram_layer_ids: tuple[int, ...]
    engram_num_embeddings: tuple[int, ...]
    engram_max_ngram_size: int
    engram_n_heads: int
    engram_head_dim: int
    engram_vocab_size: int
    engram_compressed_vocab_size: int
    engram_pad_token_id: int
    image_token_id: int  # -1 where the checkpoint has none
    # not of config.json: round what the key/value caches hold as the release does (kv_cache.py)
    kv_quantization: bool = False

    @staticmethod
    def from_checkpoint(config: dict[str, Any]) -> V41Config:
        """Read and check a whole config.json (`Checkpoint.config`).

        Raises CheckpointError naming the field if one is missing, of the wrong type, outside its range, at
        odds with another, or asks for arithmetic that is not implemented.
        """
        if config.get("model_type") != "deepseek_v41":
            raise _bad("model_type", "'deepseek_v41'", config.get("model_type"))
        text = config.get("text_config")
        if not isinstance(text, dict):
            raise _bad("text_config", "an object", text)
        for name, value in _ONLY_VALUE.items():
            if text.get(name) != value:
                raise _bad(f"text_config.{name}", repr(value), text.get(name))
        if text.get("gate_temp", 1.0) != 1.0:
            raise _bad("text_config.gate_temp", "1.0", text["gate_temp"])

        flat = _flatten_yarn(text)
        flat["image_token_id"] = config.get("image_token_id", -1)
        flat["engram_pad_token_id"] = _pad_token(text)
        flat["compress_ratios"] = _backbone_ratios(text)
        fields = [field for field in dataclasses.fields(V41Config) if field.name != "kv_quantization"]
        values = {field.name: _typed(flat, field.name, str(field.type)) for field in fields}
        result = V41Config(**values)
        result._check()
        return result

    def with_kv_quantization(self) -> V41Config:
        """The same with rounded key/value caches. Raises CheckpointError if heads do not divide into their blocks."""
        for name in ("head_dim", "index_head_dim"):
            if getattr(self, name) % BLOCK:
                raise _bad(f"text_config.{name}", f"a multiple of {BLOCK}, to round the KV cache", getattr(self, name))
        return dataclasses.replace(self, kv_quantization=True)

    @property
    def served_with_kv_quantization(self) -> bool:
        """Whether whoever serves this model rounds its key/value caches: the release's code does so always.

        Told by the cache rows (head_dim 512, index_head_dim 128), since config.json does not say. Models of other
        widths, like the example, only share the architecture and were not trained with it.
        """
        return self.head_dim == RELEASED_HEAD_DIM and self.index_head_dim == RELEASED_INDEX_HEAD_DIM

    def last_source(self, sources: tuple[int, ...], layer: int) -> int | None:
        """The latest of `sources` at or before `layer`."""
        return max((source for source in sources if source <= layer), default=None)

    def shared_made(self, layer: int) -> frozenset[str]:
        """Names of the shared attention tensors that `layer` computes (`model.State` says what they are)."""
        made = set()
        if layer in self.kv_source_layer_ids:
            made |= {"compressed_kv", "index_keys"}
        if layer in self.index_source_layer_ids:
            made.add("selected")
        if layer == self.candidate_source_layer_id:
            made.add("candidates")
        return frozenset(made)

    def shared_read(self, layer: int) -> frozenset[str]:
        """Names of the shared attention tensors that `layer` needs, its own among them."""
        if not self.compress_ratios[layer]:
            return frozenset()
        read = {"compressed_kv", "selected"}
        if layer in self.index_source_layer_ids:
            read.add("index_keys")
            if 0 <= self.candidate_source_layer_id < layer:
                read.add("candidates")
        return frozenset(read)

    def shared_carried(self, layer: int) -> frozenset[str]:
        """Names of the shared attention tensors that layers after `layer` read before they are made anew."""
        carried: set[str] = set()
        made: set[str] = set()
        for later in range(layer + 1, self.num_hidden_layers):
            made |= self.shared_made(later)
            carried |= self.shared_read(later) - made
        return frozenset(carried)

    def _check(self) -> None:
        layers = self.num_hidden_layers
        for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
            ids = getattr(self, name)
            if list(ids) != sorted(set(ids)) or any(not 0 <= i < layers for i in ids):
                raise _bad(f"text_config.{name}", f"ascending layer numbers below {layers}", list(ids))
        for layer, ratio in enumerate(self.compress_ratios):
            self._check_sources(layer, ratio)
        candidate = self.candidate_source_layer_id
        if candidate >= 0:
            if candidate not in self.index_source_layer_ids:
                raise _bad("text_config.candidate_source_layer_id", "one of index_source_layer_ids", candidate)
            for layer in self.index_source_layer_ids:
                if layer > candidate and self.compress_ratios[layer] != self.compress_ratios[candidate]:
                    found = f"ratio {self.compress_ratios[layer]} at layer {layer}"
                    want = f"the ratio {self.compress_ratios[candidate]} of candidate source {candidate}"
                    raise _bad("text_config.compress_ratios", want, found)
        rope = self.qk_rope_head_dim
        if rope % 2 or rope > min(self.head_dim, self.index_head_dim):
            raise _bad("text_config.qk_rope_head_dim", "even, at most head_dim and index_head_dim", rope)
        if self.num_attention_heads % self.o_groups:
            raise _bad("text_config.o_groups", f"a divisor of {self.num_attention_heads} heads", self.o_groups)
        if self.num_experts_per_tok > self.n_routed_experts:
            want = f"at most n_routed_experts {self.n_routed_experts}"
            raise _bad("text_config.num_experts_per_tok", want, self.num_experts_per_tok)
        if self.engram_max_ngram_size < 2:
            raise _bad("text_config.engram_max_ngram_size", "at least 2", self.engram_max_ngram_size)
        if len(self.engram_num_embeddings) != len(self.engram_layer_ids):
            want = f"{len(self.engram_layer_ids)} table sizes, one per Engram layer"
            raise _bad("text_config.engram_num_embeddings", want, list(self.engram_num_embeddings))
        if not 0 <= self.engram_pad_token_id < self.vocab_size:
            want = f"a token below vocab_size {self.vocab_size}"
            raise _bad("text_config.engram_pad_token_id", want, self.engram_pad_token_id)

    def _check_sources(self, layer: int, ratio: int) -> None:
        """A compressing layer needs a key/value source of its own ratio and an index source not before it."""
        if not ratio:
            if layer in self.kv_source_layer_ids or layer in self.index_source_layer_ids:
                raise _bad("text_config.compress_ratios", f"a ratio above 0 at source layer {layer}", 0)
            return
        kv = self.last_source(self.kv_source_layer_ids, layer)
        index = self.last_source(self.index_source_layer_ids, layer)
        if kv is None:
            raise _bad("text_config.kv_source_layer_ids", f"a source at or before layer {layer}", "none")
        if index is None or index < kv:
            # a selection made over another source's latents would point at the wrong ones
            raise _bad("text_config.index_source_layer_ids", f"a source in layers {kv} to {layer}", index)
        if self.compress_ratios[kv] != ratio:
            want = f"{self.compress_ratios[kv]} at layer {layer}, as at its source {kv}"
            raise _bad("text_config.compress_ratios", want, ratio)


def _bad(field: str, expected: str, found: object) -> CheckpointError:
    return CheckpointError(
        "the model's configuration is not one this forward implements",
        where=f"config.json, {field}",
        found=f"expected {expected}, found {found!r}",
        mend="use an original DeepSeek-V4.1 checkpoint",
    )


def _typed(values: dict[str, Any], name: str, kind: str) -> Any:
    """`values[name]` as the dataclass field's type; counts and floats must not be negative."""
    if name not in values:
        raise _bad(f"text_config.{name}", "a value", "nothing")
    value = values[name]

    def is_int(item: object) -> bool:
        return isinstance(item, int) and not isinstance(item, bool)

    if kind == "int":
        # token and layer numbers may be 0, and -1 where there is none; everything else is a count
        least = -1 if name in ("candidate_source_layer_id", "image_token_id") else 0 if name.endswith("_id") else 1
        if not is_int(value) or value < least:
            raise _bad(f"text_config.{name}", f"an integer of at least {least}", value)
    elif kind == "float":
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _bad(f"text_config.{name}", "a finite number", value)
        if value < 0 or (value == 0 and not name.endswith("_eps")):
            raise _bad(f"text_config.{name}", "a number above 0", value)
        return float(value)
    elif not isinstance(value, list) or not all(is_int(item) and item >= 0 for item in value):
        raise _bad(f"text_config.{name}", "a list of integers of at least 0", value)
    else:
        return tuple(value)
    return value


def _flatten_yarn(text: dict[str, Any]) -> dict[str, Any]:
    scaling = text.get("rope_scaling")
    if not isinstance(scaling, dict):
        raise _bad("text_config.rope_scaling", "an object", scaling)
    kinds = {scaling[key] for key in ("rope_type", "type") if key in scaling}
    if kinds != {"yarn"}:
        raise _bad("text_config.rope_scaling.rope_type", "'yarn'", sorted(map(str, kinds)))
    flat = dict(text)
    for field, key in (
        ("yarn_factor", "factor"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
        ("yarn_original_positions", "original_max_position_embeddings"),
    ):
        if key not in scaling:
            raise _bad(f"text_config.rope_scaling.{key}", "a value", "nothing")
        flat[field] = scaling[key]
    return flat


def _pad_token(text: dict[str, Any]) -> Any:
    """The Engram pad token, which releases name `engram_pad_token_id`, `engram_pad_id` or both."""
    names = [name for name in ("engram_pad_token_id", "engram_pad_id") if name in text]
    if not names:
        raise _bad("text_config.engram_pad_token_id", "a value", "nothing")
    if any(text[name] != text[names[0]] for name in names):
        raise _bad("text_config.engram_pad_id", f"engram_pad_token_id {text[names[0]]}", text[names[1]])
    return text[names[0]]


def _backbone_ratios(text: dict[str, Any]) -> Any:
    """`compress_ratios` of the backbone; the file also lists the window-only drafter layers."""
    ratios, layers, drafter = (
        text.get(name) for name in ("compress_ratios", "num_hidden_layers", "num_nextn_predict_layers")
    )
    drafter = drafter or 0
    if not isinstance(ratios, list) or not isinstance(layers, int) or not isinstance(drafter, int):
        raise _bad("text_config.compress_ratios", "a list, one entry per layer", ratios)
    if len(ratios) not in (layers, layers + drafter):
        want = f"{layers} entries (or {layers + drafter} with the drafter's)"
        raise _bad("text_config.compress_ratios", want, f"{len(ratios)} entries")
    if any(ratios[layers:]):
        raise _bad("text_config.compress_ratios", "0 for drafter layers", ratios[layers:])
    return ratios[:layers]
