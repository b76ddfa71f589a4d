"""Any supported mixture-of-experts model of transformers, one decoder layer in memory at a time.

The whole model is built on the meta device, which costs no memory. Its list of layers is replaced by relays, so that
the model's own forward tells what it hands to each layer (masks, rotary tables, positions) and what it does behind the
last one. Nothing here knows a family's masks, rotary embeddings or heads.

Float32 throughout, one window at a time, no cache, no padding. Attention is transformers' `sdpa`, or `eager` on a card
and where a family has no other (DeepSeek-V4, where a window of T tokens takes heads * T * (T + T/4) numbers at once).
"""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ...errors import CheckpointError
from ..checkpoint import Checkpoint
from ..family import State, check_window
from .config import text_config
from .layer import HIDDEN, HYPER_CONNECTION, POST, Arguments, TransformersLayer, take_out_experts
from .names import expert_names
from .weights import Weights

KEPT_LENGTHS = 2  # window lengths whose masks are kept
LENGTH_DEPENDENT = ("dynamic", "longrope")
SPECIAL_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")

Visit = Callable[[int, Tensor, Arguments], Tensor]
"""What a relay does: layer, hidden state [1, T, ...], its other arguments -> the hidden state it returns."""


class Relay(nn.Module):
    """Stands where a decoder layer was; does what the calling thread has put in `run.visit`."""

    def __init__(self, index: int, run: threading.local) -> None:
        super().__init__()
        self.index, self.run = index, run

    def forward(self, hidden_states: Tensor, *positional: Any, **keywords: Any) -> Tensor:
        return self.run.visit(self.index, hidden_states, (positional, keywords))


class StoredEmbedding(nn.Module):
    """The input embedding, whose rows are read from the checkpoint when they are asked for."""

    def __init__(self, checkpoint: Checkpoint, name: str, device: torch.device) -> None:
        super().__init__()
        self.checkpoint, self.name, self.device = checkpoint, name, device

    def forward(self, input_ids: Tensor) -> Tensor:
        rows = self.checkpoint.rows(self.name, input_ids.flatten().cpu()).to(self.device)
        return rows.view(*input_ids.shape, -1)


class TransformersModel:
    """A checkpoint under transformers' modules. See `calibrate.family.Model`.

    A window's state is {"hidden": [T, H]}, or [T, hc, H] with hyper-connections (and then, between `before_experts` and
    `after_experts`, "ffn_post" [T, hc]).
    """

    smooth: tuple[str, ...] = (HIDDEN,)
    head_reads: tuple[str, ...] = (HIDDEN,)
    kv_quantization = False

    def __init__(self, checkpoint: Checkpoint, device: torch.device | str = "cpu") -> None:
        """Raises CheckpointError for an unsupported architecture, and for a tensor that is missing or does not fit."""
        self.checkpoint, self.device = checkpoint, torch.device(device)
        self.names = expert_names(checkpoint)
        config = text_config(checkpoint.config)
        config.use_cache = config.output_router_logits = False
        # On a card the fused kernels' backward adds in no fixed order: a resumed pass would end in other bytes.
        attention = {} if self.device.type == "cpu" else {"attn_implementation": "eager"}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **attention)
        self._model: PreTrainedModel = model.eval()
        backbone = self._model.base_model
        self._layers: list[nn.Module] = list(backbone.layers)
        self.kept: tuple[str, ...] = (POST,) if hasattr(self._layers[0], HYPER_CONNECTION) else ()
        self._dense = [not take_out_experts(layer) for layer in self._layers]
        self._check_dense()
        self._check_rotary()
        self._weights = Weights.of(checkpoint, self._model, self.names)
        self._paths = {module: name for name, module in self._model.named_modules()}  # before the relays come
        self._run = threading.local()
        backbone.layers = nn.ModuleList(Relay(index, self._run) for index in range(len(self._layers)))
        self._head = self._model.get_output_embeddings()
        self._fill_rest(backbone)
        self._lock = threading.Lock()
        self._arguments: OrderedDict[int, list[Arguments]] = OrderedDict()

    @property
    def layers(self) -> int:
        return len(self._layers)

    @property
    def vocabulary(self) -> int:
        return self.names.sizes.vocabulary

    @property
    def banned(self) -> tuple[int, ...]:
        """Tokens that stand for images."""
        tokens = (self.checkpoint.config.get(key) for key in SPECIAL_TOKENS)
        return tuple(token for token in tokens if isinstance(token, int))

    def check_ids(self, ids: Tensor, where: str = "") -> None:
        """Raise TraceError unless `ids` is int64 [T], T above 0, of tokens that exist; `where` names it."""
        check_window(ids, self.vocabulary, self.banned, where)

    def embed(self, ids: Tensor) -> State:
        """State before layer 0 of one window. ids: int64 [T], T > 0. Raises TraceError for a bad token."""
        self.check_ids(ids)
        found: list[Tensor] = []

        def visit(index: int, hidden: Tensor, arguments: Arguments) -> Tensor:
            found[index:] = [] if index else [hidden.squeeze(0).contiguous()]
            return hidden

        with torch.no_grad():
            self._through(self._model.base_model, ids, visit)
        return {HIDDEN: found[0]}

    def load_layer(self, layer: int) -> TransformersLayer:
        """Read layer `layer` without its routed experts, float32."""
        module = copy.deepcopy(self._layers[layer])
        self._weights.fill(module, self._layer_path(layer), self._model, self.device)
        return TransformersLayer(
            layer, module, lambda ids: self._layer_arguments(layer, ids), self.checkpoint, self.names, self.device
        )

    def read_ahead(self, layer: int) -> None:
        """See `calibrate.family.Model`."""
        prefix = self.names.layer_prefix(layer)
        self.checkpoint.read_ahead(name for name in self.checkpoint.tensors if name.startswith(prefix))

    def logits(self, state: State, positions: slice = slice(None)) -> Tensor:
        """Logits float32 [T, V] of the state behind the last layer, or of some positions of it.

        Nothing behind the layers mixes positions, so the model is run on those alone. The first call loads the head.
        """
        hidden = state[HIDDEN][positions].unsqueeze(0)
        with self._lock:  # windows are scored in parallel; the head must not be read twice
            if next(self._head.parameters()).is_meta:
                self._fill(self._head)
        # the relays ignore the token
        return self._through(self._model, torch.zeros(1, dtype=torch.int64), lambda *_: hidden).logits.squeeze(0)

    def _layer_arguments(self, layer: int, ids: Tensor) -> Arguments:
        """What the model hands a layer for a window: the same for all windows of one length, but for the tokens."""
        with self._lock:
            if len(ids) not in self._arguments:
                found: list[Arguments] = []

                def visit(index: int, hidden: Tensor, arguments: Arguments) -> Tensor:
                    found.append(arguments)
                    return hidden

                with torch.no_grad():
                    self._through(self._model.base_model, ids, visit)
                self._arguments[len(ids)] = found
                while len(self._arguments) > KEPT_LENGTHS:
                    self._arguments.popitem(last=False)
            self._arguments.move_to_end(len(ids))
            positional, keywords = self._arguments[len(ids)][layer]
        if "input_ids" in keywords:
            keywords = keywords | {"input_ids": ids.unsqueeze(0).to(self.device)}
        return positional, keywords

    def _through(self, model: nn.Module, ids: Tensor, visit: Visit) -> Any:
        """Run a model of relays on one window."""
        self._run.visit = visit
        try:
            return model(input_ids=ids.unsqueeze(0).to(self.device), use_cache=False)
        finally:
            del self._run.visit

    def _fill_rest(self, backbone: nn.Module) -> None:
        """Everything in memory but layers, embedding and head: final norm, rotary tables, hyper-connections' head."""
        name = f"{self._paths[self._model.get_input_embeddings()]}.weight"
        stored = self._weights.stored[name]
        for child in list(backbone.children()):
            if child is not backbone.layers and child is not self._model.get_input_embeddings():
                self._fill(child)
        self._model.set_input_embeddings(StoredEmbedding(self.checkpoint, stored, self.device))

    def _fill(self, module: nn.Module) -> None:
        self._weights.fill(module, f"{self._paths[module]}.", self._model, self.device)

    def _layer_path(self, layer: int) -> str:
        return f"{self._paths[self._layers[layer]]}."

    def _check_rotary(self) -> None:
        """Frequencies that follow the longest window so far are a state that windows in parallel would share."""
        for module in self._model.modules():
            kind = getattr(module, "rope_type", "default")
            if kind in LENGTH_DEPENDENT:
                raise CheckpointError(
                    "rotary frequencies that depend on a text's length are not supported",
                    where=f"{self.checkpoint.path / 'config.json'}, rope_parameters",
                    found=f"expected default, linear, yarn or llama3, found {kind}",
                    mend="set the rope_type that fits windows of calibration length",
                )

    def _check_dense(self) -> None:
        """The layers with experts are those that `names.sizes` says; names on disk and in packs hang on it."""
        moe = [index for index, dense in enumerate(self._dense) if not dense]
        if tuple(moe) != self.names.sizes.moe_layers:
            raise CheckpointError(
                "transformers places this model's experts in other layers than expected",
                where=str(self.checkpoint.path / "config.json"),
                found=f"expected layers {list(self.names.sizes.moe_layers)}, found {moe}",
                mend="install the transformers release that moefit was tested with",
            )
