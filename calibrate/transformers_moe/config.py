"""A checkpoint's config.json as transformers' configuration. Nothing is fetched, no remote code is run."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from ...errors import CheckpointError
from .names import FAMILIES, architecture


def text_config(config: dict[str, Any]) -> PretrainedConfig:
    """Configuration of the text backbone; keys that the release left out take transformers' defaults.

    Raises CheckpointError for an unsupported architecture, and for values that transformers refuses.
    """
    family = FAMILIES[architecture(config)]
    values = dict(config.get("text_config", config))
    if (found := values.get("model_type", family.model_type)) != family.model_type:
        raise CheckpointError(
            "architectures and model_type name different families",
            where="config.json, model_type",
            found=f"expected {family.model_type}, found {found!r:.60}",
            mend="use the config.json that came with the checkpoint",
        )
    # weights are decoded to float32 here: how the release stores or loads them is not the module's business
    for key in ("model_type", "quantization_config", "dtype", "torch_dtype", "auto_map", "_name_or_path"):
        values.pop(key, None)
    if "tie_word_embeddings" in config:
        values["tie_word_embeddings"] = config["tie_word_embeddings"]
    try:
        return AutoConfig.for_model(family.model_type, **values)
    except Exception as error:  # whatever the configuration's own validation raises
        raise CheckpointError(
            "transformers does not accept this configuration",
            where="config.json",
            found=" ".join(str(error).split())[:300],
            mend=f"compare it with the release's own config.json ({family.model_type})",
        ) from error
