"""Engram: n-gram hash tables read into the residual before some layers.

Every token looks up one row per n-gram order (2 to `engram_max_ngram_size`) and hash head. The rows are read
from the shards on demand: the released tables are 101 GB each.
Source: the DeepSeek-V4.1 reference inference code.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor

from ...errors import CheckpointError
from ..checkpoint import Checkpoint, wrong_shape
from .blocks import by_blocks, mean_square
from .config import V41Config
from .weights import Weights

# A private-use character that carries a token of exactly one space through Strip.
_SPACE = "\ue000"


def compressed_vocabulary(tokenizer: Tokenizer) -> np.ndarray:
    """Class of every token id, int64 [V]: tokens that differ in case, accents or outer space are one class.

    Classes are numbered in order of first appearance. A token that is part of a UTF-8 character (its text
    holds U+FFFD) is a class of its own.
    """
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _SPACE),
            normalizers.Strip(),
            normalizers.Replace(_SPACE, " "),
        ]
    )
    classes: dict[str | None, int] = {}
    result = np.empty(tokenizer.get_vocab_size(with_added_tokens=True), dtype=np.int64)
    for token in range(len(result)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token) if "\ufffd" in text else normalizer.normalize_str(text) or text
        result[token] = classes.setdefault(key, len(classes))
    return result


def next_primes(start: int, count: int) -> list[int]:
    """The `count` smallest primes that are at least `start`."""
    primes: list[int] = []
    number = max(start, 2)
    while len(primes) < count:
        if number == 2 or (number % 2 and all(number % d for d in range(3, int(number**0.5) + 1, 2))):
            primes.append(number)
        number += 1
    return primes


@dataclass(frozen=True)
class NgramHash:
    """Token ids -> table rows of one Engram layer.

    classes: int64 [V], `compressed_vocabulary`.
    pad: class that stands for every position before the text.
    multipliers: int64 [max_ngram_size], odd; the one of a token n positions back is the n-th.
    primes, offsets: int64 [orders, heads], size and first row of each hash table's part.
    """

    classes: np.ndarray
    pad: int
    multipliers: np.ndarray
    primes: np.ndarray
    offsets: np.ndarray

    @staticmethod
    def from_config(config: V41Config, layer: int, classes: np.ndarray) -> NgramHash:
        """Raises CheckpointError if config.json's table sizes do not follow from its other numbers."""
        orders, heads = config.engram_max_ngram_size - 1, config.engram_n_heads
        which = config.engram_layer_ids.index(layer)
        # Part sizes are the primes from engram_vocab_size on, each used once over all Engram layers.
        primes = next_primes(config.engram_vocab_size, (which + 1) * orders * heads)[which * orders * heads :]
        if sum(primes) != config.engram_num_embeddings[which]:
            raise CheckpointError(
                "the Engram table is not as large as its hash functions reach",
                where=f"config.json, text_config.engram_num_embeddings[{which}]",
                found=f"expected {sum(primes)}, found {config.engram_num_embeddings[which]}",
                mend="use an original DeepSeek-V4.1 checkpoint",
            )
        # Half of the largest factor that cannot overflow int64: doubled and made odd, it still cannot.
        bound = max(1, np.iinfo(np.int64).max // config.engram_compressed_vocab_size // 2)
        draws = np.random.default_rng(10007 * layer).integers(0, bound, orders + 1, dtype=np.int64)
        offsets = np.cumsum([0, *primes[:-1]], dtype=np.int64)
        return NgramHash(
            classes=classes,
            pad=int(classes[config.engram_pad_token_id]),
            multipliers=2 * draws + 1,
            primes=np.array(primes, dtype=np.int64).reshape(orders, heads),
            offsets=offsets.reshape(orders, heads),
        )

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """ids int [T] -> table rows int64 [T, orders * heads], order-major."""
        tokens = self.classes[ids]  # [T]
        rolling = tokens * self.multipliers[0]
        columns = []
        for back in range(1, len(self.multipliers)):
            earlier = np.concatenate([np.full(min(back, len(tokens)), self.pad), tokens[:-back]])  # [T]
            rolling = rolling ^ (earlier * self.multipliers[back])
            order = back - 1
            columns.append(rolling[:, None] % self.primes[order] + self.offsets[order])  # [T, heads]
        return np.concatenate(columns, axis=1)


def load_classes(path: Path, config: V41Config) -> np.ndarray:
    """`compressed_vocabulary` of a checkpoint's own tokenizer.json.

    Raises CheckpointError if it is missing, unreadable, or does not give the number of classes in
    config.json: every multiplier follows from that number, so another tokenizer would read random rows.
    """
    file = path / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for a missing or malformed file
        raise CheckpointError(
            "the tokenizer cannot be read", where=str(file), found=str(error), mend="download it again"
        ) from error
    classes = compressed_vocabulary(tokenizer)
    found = int(classes.max(initial=-1)) + 1
    if found != config.engram_compressed_vocab_size or len(classes) > config.vocab_size:
        raise CheckpointError(
            "the tokenizer does not belong to this checkpoint",
            where=str(file),
            found=f"expected {config.engram_compressed_vocab_size} classes of at most {config.vocab_size} "
            f"tokens (config.json), found {found} classes of {len(classes)} tokens",
            mend="use the tokenizer.json that came with the checkpoint",
        )
    return classes


@dataclass(frozen=True)
class Engram:
    """One layer's Engram: wkv [(hc + 1) H, columns * dim], key scale [hc, H]; the table only by its name."""

    checkpoint: Checkpoint
    table: str
    hash: NgramHash
    wkv: Tensor
    scale: Tensor

    @staticmethod
    def load(weights: Weights, config: V41Config, layer: int, classes: np.ndarray) -> Engram:
        hc, hidden, dim = config.hc_mult, config.hidden_size, config.engram_head_dim
        ngrams = NgramHash.from_config(config, layer, classes)
        table = f"{weights.prefix}embed.weight"
        shape = (int(ngrams.primes.sum()), dim)
        found = weights.checkpoint.info(table).shape
        if found != shape:
            raise wrong_shape(weights.checkpoint, table, shape, found)
        return Engram(
            checkpoint=weights.checkpoint,
            table=f"{weights.prefix}embed",
            hash=ngrams,
            wkv=weights("wkv", (hc + 1) * hidden, ngrams.primes.size * dim),
            scale=weights("q_weight", hc, hidden) * weights("k_weight", hc, hidden),
        )

    def forward(self, residual: Tensor, ids: Tensor, config: V41Config) -> Tensor:
        """residual [T, hc, H], ids int64 [T] -> new residual: each stream takes the value by its gate."""
        rows = torch.from_numpy(self.hash.rows(ids.cpu().numpy()))  # [T, columns]; n-grams reach across blocks

        def part(block: slice) -> Tensor:
            memory = self.checkpoint.rows(self.table, rows[block].flatten()).to(residual.device)
            memory = memory.view(len(rows[block]), -1)
            return self._block(residual[block], memory, config)  # memory [B, columns * dim]

        return by_blocks(part, len(ids))

    def _block(self, residual: Tensor, memory: Tensor, config: V41Config) -> Tensor:
        hc, hidden = residual.shape[1:]
        keys, value = (memory @ self.wkv.T).split([hc * hidden, hidden], dim=-1)
        keys = keys.unflatten(-1, (hc, hidden))  # [B, hc, H]
        dot = (residual * self.scale * keys).sum(-1) * hidden**-0.5  # [B, hc]
        for side in (residual, keys):
            dot = dot * torch.rsqrt(mean_square(side) + config.rms_norm_eps)
        gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=1e-6).sqrt(), dot))
        return residual + gate.unsqueeze(-1) * value.unsqueeze(1)
