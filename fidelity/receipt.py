"""`fidelity.json`: what was compared, what came out, and the rows to judge it again. Spec: docs/receipt.md.

The verdict and all intervals follow from the rows and the policy. The reader computes them anew and refuses a
receipt that says otherwise, so an edited number does not survive.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from ..errors import FidelityError
from ..files import json_bytes, write_atomic
from .gate import Control, Corpus, Policy, Verdict, judge
from .statistics import Bootstrap, WindowRow

FORMAT = "moefit-fidelity"
VERSION = 1
MAX_BYTES = 64 << 20
MAX_WINDOWS = 100_000
LARGEST_NATS = 1e39  # per token: float32 logits cannot lie further apart
TOLERANCE = 1e-9  # relative: another release of numpy or scipy may round the last digits differently
MEND = "measure again with `moefit gate`"

Fields = TypeVar("Fields")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Protocol:
    """How the windows were cut and the models run.

    window_tokens: most tokens of a window.
    windows_per_document: most windows of a document, from its start.
    shortest_window: tokens below which a window is left out.
    dtype: of the forward passes, e.g. "float32".
    tokens: how a document becomes ids, e.g. "[bos] + encode(text); agentic through the chat template".
    """

    window_tokens: int
    windows_per_document: int
    shortest_window: int
    dtype: str
    tokens: str


@dataclass(frozen=True)
class Receipt:
    """A measurement and its verdict.

    inputs: name -> hex sha256 of what was compared, e.g. reference, candidate, tokenizer.
    corpora: name -> hash, window rows and control. verdict: `judge(corpora, policy)`.
    """

    protocol: Protocol
    inputs: Mapping[str, str]
    policy: Policy
    corpora: Mapping[str, Corpus]
    verdict: Verdict


def make_receipt(
    protocol: Protocol, inputs: Mapping[str, str], policy: Policy, corpora: Mapping[str, Corpus]
) -> Receipt:
    """Judge a measurement and bind it to its inputs. Raises FidelityError where the pieces do not fit."""
    corpora = dict(sorted(corpora.items()))
    _check(protocol, inputs, corpora)
    return Receipt(protocol, dict(inputs), policy, corpora, judge(corpora, policy))


def receipt_json(receipt: Receipt) -> dict[str, Any]:
    """The receipt as JSON values, as docs/receipt.md lays them out."""
    policy = {
        "max_kl": _limit_json(receipt.policy.max_kl),
        "min_top1": _limit_json(receipt.policy.min_top1),
        "min_documents": receipt.policy.min_documents,
        "bootstrap": asdict(receipt.policy.bootstrap),
    }
    corpora = {
        name: {
            "sha256": corpus.sha256,
            "control": asdict(corpus.control),
            "windows": [asdict(window) for window in corpus.windows],
            "measured": asdict(receipt.verdict.summaries[name]),
            "outcome": receipt.verdict.corpus(name).value,
        }
        for name, corpus in receipt.corpora.items()
    }
    findings = [asdict(f) | {"outcome": f.outcome.value} for f in receipt.verdict.findings]
    for finding in findings:
        del finding["estimate"]  # it stands under measured
    return {
        "format": FORMAT,
        "version": VERSION,
        "protocol": asdict(receipt.protocol),
        "inputs": dict(receipt.inputs),
        "policy": policy,
        "corpora": corpora,
        "verdict": {"outcome": receipt.verdict.outcome.value, "findings": findings},
    }


def receipt_bytes(receipt: Receipt) -> bytes:
    """Canonical bytes: the same measurement gives the same file."""
    return json_bytes(receipt_json(receipt))


def write_receipt(path: Path, receipt: Receipt) -> None:
    """Write `fidelity.json`, whole or not at all."""
    write_atomic(path, receipt_bytes(receipt))


def read_receipt(path: Path) -> Receipt:
    """Read, validate and judge again. Raises FidelityError naming the field that is wrong."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            _refuse("receipt too large", str(path), f"expected at most {MAX_BYTES:,} bytes, found {size:,}")
        stored = json.loads(path.read_bytes(), object_pairs_hook=_no_duplicates, parse_constant=_no_constants)
    except OSError as error:
        raise FidelityError("cannot read the receipt", where=str(path), found=str(error.strerror)) from error
    except (ValueError, RecursionError) as error:
        raise FidelityError("not a JSON receipt", where=str(path), found=str(error)[:200], mend=MEND) from error
    try:
        receipt = _parse(stored)
        _same(receipt_json(receipt), stored, "")
    except FidelityError as error:
        where = f"{path}: {error.where}" if error.where else str(path)
        raise FidelityError(error.what, where=where, found=error.found, mend=error.mend or MEND) from None
    return receipt


def _check(protocol: Protocol, inputs: Mapping[str, str], corpora: Mapping[str, Corpus]) -> None:
    counts = (protocol.window_tokens, protocol.windows_per_document, protocol.shortest_window)
    if min(counts) < 1 or max(counts) > 2**31 or protocol.shortest_window > protocol.window_tokens:
        _refuse("window protocol out of range", "protocol", f"found {protocol}")
    for name, digest in [*inputs.items(), *((name, corpus.sha256) for name, corpus in corpora.items())]:
        if not _SHA256.fullmatch(digest):
            _refuse("not a sha256", name, f"expected 64 hex digits, found {digest!r}")
    for required in ("reference", "candidate"):
        if required not in inputs:
            _refuse("input without a hash", f"inputs.{required}", f"found {sorted(inputs)}")
    if sum(len(corpus.windows) for corpus in corpora.values()) > MAX_WINDOWS:
        _refuse("too many windows", "corpora", f"expected at most {MAX_WINDOWS:,}")
    for name, corpus in corpora.items():
        per_document: dict[str, int] = {}
        for index, window in enumerate(corpus.windows):
            where = f"corpora.{name}.windows[{index}]"
            per_document[window.document] = per_document.get(window.document, 0) + 1
            if per_document[window.document] > protocol.windows_per_document:
                _refuse("more windows of a document than the protocol has", where, repr(window.document))
            _check_window(window, protocol, where)
        control = corpus.control
        if control.tokens < 1 or not all(map(math.isfinite, (control.kl, control.top1, control.self_kl))):
            _refuse("impossible control", f"corpora.{name}.control", f"found {control}")


def _check_window(window: WindowRow, protocol: Protocol, where: str) -> None:
    if not 2 <= window.tokens <= protocol.window_tokens:
        _refuse(
            "window of another length than the protocol has",
            f"{where}.tokens",
            f"expected 2 to {protocol.window_tokens}, found {window.tokens}",
        )
    if not 0 <= window.top1_hits <= window.tokens:
        _refuse("more agreements than tokens", f"{where}.top1_hits", f"found {window.top1_hits}")
    for field in ("kl", "kl_squares", "reference_nll", "candidate_nll"):
        value = getattr(window, field)
        most = LARGEST_NATS**2 if field == "kl_squares" else LARGEST_NATS
        if not 0 <= value <= most * window.tokens:  # false for NaN too
            _refuse("impossible sum", f"{where}.{field}", f"expected finite and >= 0, found {value}")
    # The squares of T numbers >= 0 sum to at least the square of their sum over T, and at most that square.
    square = window.kl * window.kl
    least, most = square / window.tokens * (1 - TOLERANCE), square * (1 + TOLERANCE)
    if not least - 1e-300 <= window.kl_squares <= most + 1e-300:  # squares may be denormal
        _refuse("sum and sum of squares cannot both be", f"{where}.kl_squares", f"found {window}")


def _parse(stored: Any) -> Receipt:
    top = _object(stored, "", {"format", "version", "protocol", "inputs", "policy", "corpora", "verdict"})
    if (top["format"], top["version"]) != (FORMAT, VERSION):
        _refuse(
            "receipt of another format or version",
            "version",
            f"expected {FORMAT} {VERSION}, found {top['format']!s:.40} {top['version']!s:.40}",
        )
    protocol = _dataclass(Protocol, top["protocol"], "protocol")
    inputs = _object(top["inputs"], "inputs")
    for name, digest in inputs.items():
        _typed(digest, "str", f"inputs.{name}")
    corpora = {}
    for name, value in _object(top["corpora"], "corpora").items():
        at = f"corpora.{name}"
        corpus = _object(value, at, {"sha256", "control", "windows", "measured", "outcome"})
        rows = corpus["windows"]
        if not isinstance(rows, list):
            _refuse("not a list", f"{at}.windows", f"found {type(rows).__name__}")
        corpora[name] = Corpus(
            sha256=_typed(corpus["sha256"], "str", f"{at}.sha256"),
            windows=tuple(_dataclass(WindowRow, row, f"{at}.windows[{i}]") for i, row in enumerate(rows)),
            control=_dataclass(Control, corpus["control"], f"{at}.control"),
        )
    return make_receipt(protocol, inputs, _policy(top["policy"]), corpora)


def _policy(stored: Any) -> Policy:
    value = _object(stored, "policy", {field.name for field in fields(Policy)})
    limits: dict[str, Any] = {}
    for rule in ("max_kl", "min_top1"):
        at = f"policy.{rule}"
        if isinstance(value[rule], dict):
            limits[rule] = {name: _typed(v, "float", f"{at}.{name}") for name, v in value[rule].items()}
        elif rule == "max_kl" or value[rule] is not None:
            limits[rule] = _typed(value[rule], "float", at)
    return Policy(
        **limits,
        min_documents=_typed(value["min_documents"], "int", "policy.min_documents"),
        bootstrap=_dataclass(Bootstrap, value["bootstrap"], "policy.bootstrap"),
    )


def _limit_json(limit: float | Mapping[str, float] | None) -> float | dict[str, float] | None:
    if isinstance(limit, Mapping):
        return {name: float(value) for name, value in limit.items()}
    return None if limit is None else float(limit)


def _object(value: Any, where: str, keys: set[str] | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse("not an object", where, f"found {type(value).__name__}")
    if keys is not None and value.keys() != keys:
        missing, unknown = sorted(keys - value.keys()), sorted(value.keys() - keys)
        _refuse("wrong fields", where, f"missing {missing}, unknown {unknown}")
    return value


def _typed(value: Any, kind: str, where: str) -> Any:
    """`value` as a "str", "int" or "float" (which takes an integer too); a bool is neither number."""
    if isinstance(value, {"str": str, "int": int, "float": int | float}[kind]) and not isinstance(value, bool):
        try:
            return float(value) if kind == "float" else value
        except OverflowError:
            pass
    return _refuse("wrong type", where, f"expected {kind}, found {str(value)[:40]!r}")


def _dataclass(kind: type[Fields], value: Any, where: str) -> Fields:
    """A dataclass of str, int and float fields from an object with exactly these fields."""
    names = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    stored = _object(value, where, set(names))
    return kind(**{name: _typed(stored[name], type_, f"{where}.{name}") for name, type_ in names.items()})


def _same(expected: Any, stored: Any, where: str) -> None:
    """Refuse the first place where what follows from the rows is not what is stored."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            _same(value, _object(stored, where, set(expected))[key], f"{where}.{key}".lstrip("."))
        return
    if isinstance(expected, list):
        if not isinstance(stored, list) or len(stored) != len(expected):
            _refuse("receipt contradicts its own rows", where, f"expected {len(expected)} entries")
        for index, value in enumerate(expected):
            _same(value, stored[index], f"{where}[{index}]")
        return
    if isinstance(expected, float):
        equal = math.isclose(expected, _typed(stored, "float", where), rel_tol=TOLERANCE, abs_tol=1e-12)
    else:
        equal = type(expected) is type(stored) and expected == stored
    if not equal:
        _refuse("receipt contradicts its own rows", where, f"expected {expected}, found {stored}")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return value


def _no_constants(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _refuse(what: str, where: str, found: str) -> NoReturn:
    raise FidelityError(what, where=where, found=found, mend=MEND)
