"""What a capture must look like for one model: its layers, experts and top-k, from `config.json` alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import CheckpointError, TraceError

EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
OTHER_MODEL = "give --model the model that the traffic ran on"


@dataclass(frozen=True)
class MoeShape:
    """hidden_layers: decoder layers in all. layers: the numbers of those with routed experts, ascending [L].

    experts: E, routed experts per layer. top_k: of them per token. drafter_layers: layers after the last (MTP),
    which captures may hold and which are left out.
    """

    hidden_layers: int
    layers: tuple[int, ...]
    experts: int
    top_k: int
    drafter_layers: int = 0

    @classmethod
    def read(cls, model: Path) -> MoeShape:
        """model: a checkpoint's or a pack's directory, or its config.json. CheckpointError where there is none."""
        path = model / "config.json" if model.is_dir() else model
        mend = "give the directory of the model that the traffic ran on, or its config.json"
        try:
            config = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError("config.json cannot be read", where=str(path), found=str(error), mend=mend) from error
        if not isinstance(config, dict):
            raise CheckpointError("config.json is not an object", where=str(path), mend=mend)
        return cls.from_config(config, str(path))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str = "config.json") -> MoeShape:
        """From the fields that transformers' configurations use. Raises CheckpointError for a model without experts."""
        nested = next((config[key] for key in ("text_config", "language_config", "llm_config") if key in config), None)
        text = nested if isinstance(nested, dict) else config
        hidden = _count(text, ("num_hidden_layers", "num_layers"), where)
        experts, top_k = _count(text, EXPERTS, where), _count(text, TOP_K, where)
        layers = tuple(layer for layer in range(hidden) if _is_routed(text, layer))
        if not layers or top_k > experts:
            found = (
                f"expected a layer with experts and top-k <= experts, found {len(layers)} layers, {top_k} > {experts}"
            )
            raise CheckpointError("config.json describes no mixture of experts", where=where, found=found)
        drafters = text.get("num_nextn_predict_layers")
        return cls(hidden, layers, experts, top_k, drafters if type(drafters) is int else 0)

    def routed(self, values: np.ndarray, axis: int, where: str) -> tuple[np.ndarray, np.ndarray]:
        """(values of the layers with experts, values of the dense ones), cut from a recorded layer axis.

        Engines record either every decoder layer or those with experts only. Raises TraceError for another number.
        """
        recorded, dense = values.shape[axis], self.hidden_layers - len(self.layers)
        if recorded == len(self.layers) and dense:
            return values, np.take(values, [], axis)
        if recorded != self.hidden_layers:
            numbers = f"{len(self.layers)} with experts"
            if dense:
                numbers = f"{self.hidden_layers} in all, or the {numbers} ({span(self.layers)})"
            raise TraceError(
                "the capture has a wrong number of layers",
                where=where,
                found=f"expected {numbers}, found {recorded}",
                mend=OTHER_MODEL,
            )
        others = sorted(set(range(self.hidden_layers)) - set(self.layers))
        return np.take(values, self.layers, axis), np.take(values, others, axis)

    def stack(self, counts: Mapping[int, np.ndarray], where: str) -> np.ndarray:
        """[L, ...] of counts given by layer number. Raises TraceError where a layer is missing or too many."""
        known = [
            layer for layer in counts if not self.hidden_layers <= layer < self.hidden_layers + self.drafter_layers
        ]
        if sorted(known) != list(self.layers):
            raise TraceError(
                "the capture has a wrong number of layers",
                where=where,
                found=f"expected {len(self.layers)} ({span(self.layers)}), found {len(known)} ({span(known)})",
                mend=f"{OTHER_MODEL}, and a capture of all its layers",
            )
        shapes = {counts[layer].shape for layer in self.layers}
        if len(shapes) > 1:
            found = f"found {sorted(shapes)}"
            raise TraceError("the layers of a capture have different numbers of experts", where=where, found=found)
        return np.stack([counts[layer] for layer in self.layers])


def span(layers: tuple[int, ...] | list[int]) -> str:
    """[3, 4, 5, 9] -> "layers 3-5, 9"."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return "layers " + ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "") if shown else "none"


def _count(text: Mapping[str, Any], keys: tuple[str, ...], where: str) -> int:
    for key in keys:
        value = text.get(key)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if type(value) is int and value > 0:
            return value
    raise CheckpointError(
        "config.json does not say how its experts are routed",
        where=where,
        found=f"expected a whole number in one of {', '.join(keys)}",
        mend="give the config.json of a mixture-of-experts model",
    )


def _is_routed(text: Mapping[str, Any], layer: int) -> bool:
    """Whether a decoder layer has routed experts; the names are those of transformers' configurations."""

    def number(key: str, default: int) -> int:
        value = text.get(key)
        return value if type(value) is int else default

    def listed(key: str) -> list[Any] | None:
        value = text.get(key)
        return value if isinstance(value, list) else None

    if (types := listed("mlp_layer_types")) is not None:
        return layer < len(types) and types[layer] != "dense"
    if (moe := listed("moe_layers")) is not None:
        return layer in moe
    if layer < max(
        number("first_k_dense_replace", 0), number("num_dense_layers", 0), number("moe_layer_start_index", 0)
    ):
        return False
    end = number("moe_layer_end_index", -1)
    if layer in (listed("mlp_only_layers") or []) or (end >= 0 and layer > end):
        return False
    if (flags := listed("moe_layer_freq")) is not None:
        return layer < len(flags) and bool(flags[layer])
    period, offset = number("expert_layer_period", 1), number("expert_layer_offset", 0)
    steps = (number(key, 1) for key in ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval"))
    return (
        layer % max(1, number("moe_layer_freq", 1)) == 0
        and all(step < 1 or (layer + 1) % step == 0 for step in steps)
        and layer % max(1, period) == offset % max(1, period)
    )
