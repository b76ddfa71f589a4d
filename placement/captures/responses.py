"""Answers of vLLM and SGLang with the routing of their tokens, as JSON or JSON lines, gzip too.

A record is an answer, a list of answers, or a log's request with its answer. Where the answer counts its tokens
(`usage`, `meta_info`), rows are told apart: those of the prompt are prefill, later ones decode; those that the engine
took from its prefix cache were routed by an earlier request and are left out; and their number must be right.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import TraceError
from .shape import OTHER_MODEL, MoeShape
from .tally import Left, Piece, TopK
from .vllm import NPY_BASE64, decode, from_base64, from_lists

CACHED, WITHOUT = "tokens that the engine took from its prefix cache", "answers without routing"
ANSWER_KEYS = ("response", "response_body", "body", "output", "result", "completion")
REQUEST_KEYS = ("request", "request_body", "input")
START_KEYS = ("routed_experts_prompt_start", "routed_experts_start_len")
_NESTED = ("sampling_params", "extra_body", "vllm_xargs")


class Answer(NamedTuple):
    """Routing of one sequence. value: as it travels. prompt, completion: tokens, None where the answer does not say.

    start: rows cut from the front. cached: prompt tokens from the prefix cache. part: the rows are of the whole
    sequence, or of its prompt or of what was generated only (vLLM 0.21). follows: on the prompt just before.
    """

    engine: str
    where: str
    value: Any
    prompt: int | None = None
    completion: int | None = None
    cached: int = 0
    start: int = 0
    part: str = "whole"
    follows: bool = False


def pieces(path: Path, engine: str, shape: MoeShape) -> Iterator[Piece]:
    """engine: `vllm` or `sglang`; answers of the other one are refused."""
    conversation = -1
    for record, where in records(path):
        for answer in answers(record, where):
            conversation += not answer.follows
            if answer.value is None:
                yield Left(WITHOUT, 1)
                continue
            if answer.engine != engine:
                mend = "give the answers of one engine per file"
                raise TraceError("an answer of another engine", where=answer.where, found=answer.engine, mend=mend)
            if isinstance(answer.value, dict) and (start := _whole(answer.value.get("start"))):
                answer = answer._replace(start=start)
            ids = _sglang_ids(answer, shape) if engine == "sglang" else decode(answer.value, answer.where)
            if not ids.size:  # `[]`, where only one token was sampled
                ids = np.zeros((0, shape.hidden_layers, shape.top_k), dtype=np.int64)
            if ids.ndim != 3:
                found = f"expected [tokens, layers, top_k], found {list(ids.shape)}"
                raise TraceError("recorded routing has the wrong shape", where=answer.where, found=found)
            yield from _phases(answer, ids, conversation)


def first_engine(path: Path) -> str:
    """`vllm` or `sglang`, of the first answer with routing; "" where there is none."""
    seen = (answer for record, where in records(path) for answer in answers(record, where))
    return next((answer.engine for answer in seen if answer.value is not None), "")


def records(path: Path) -> Iterator[tuple[Any, str]]:
    """(JSON value, file and line). One document over several lines is one record; so is a line of bare base64."""
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path, "rb") if zipped else path.open("rb") as file:
            begun = False
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                first, begun = not begun, True
                where = f"{path}, line {number}"
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    if line.lstrip().startswith(NPY_BASE64.encode()):
                        value = (line + file.read()).decode("ascii", errors="replace")
                    elif first:
                        yield _document(line + file.read(), path), str(path)
                        return
                    else:
                        raise TraceError("a line is not JSON", where=where, found=str(error)) from error
                yield value, where
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError("a gzip file is cut short", where=str(path), found=str(error), mend="copy it again") from error


def _document(content: bytes, path: Path) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        mend = "give JSON lines, one answer a line, or one JSON document"
        raise TraceError("a file is not JSON", where=str(path), found=str(error), mend=mend) from error


def answers(record: Any, where: str, request: Any = None, depth: int = 3) -> Iterator[Answer]:
    """The answers of a record, those without routing with the value None; none where the record is no answer."""
    if _is_routing(record):
        yield Answer("vllm", where, record)
    elif isinstance(record, list) and depth:
        for number, item in enumerate(record):
            yield from answers(item, f"{where}, answer {number}", request, depth - 1)
    elif not isinstance(record, dict):
        return
    elif isinstance(record.get("choices"), list):
        yield from _of_choices(record, where, _start(request if request is not None else record))
    elif isinstance(record.get("meta_info"), dict):
        meta = record["meta_info"]
        prompt, completion, cached = (
            _tokens(meta, f"{name}_tokens", where) for name in ("prompt", "completion", "cached")
        )
        start = _start(request if request is not None else record)
        yield Answer("sglang", where, meta.get("routed_experts"), prompt, completion, cached or 0, start)
    elif isinstance(record.get("outputs"), list):  # vLLM's RequestOutput
        yield from _of_outputs(record, where, _start(request if request is not None else record))
    elif "routed_experts" in record:
        prompt, completion = _length(record.get("prompt_token_ids")), _length(record.get("token_ids"))
        yield Answer("vllm", where, record["routed_experts"], prompt, completion, start=_start(record))
    elif depth:
        asked = next((record[key] for key in REQUEST_KEYS if key in record), request)
        for key in ANSWER_KEYS:
            inner = record.get(key)
            if isinstance(inner, str) and inner.lstrip()[:1] in ("{", "["):
                try:
                    inner = json.loads(inner)
                except (ValueError, RecursionError) as error:
                    raise TraceError("an answer is not JSON", where=f"{where}, {key}", found=str(error)) from error
            if isinstance(inner, dict | list):
                yield from answers(inner, where, asked, depth - 1)


def _is_routing(record: Any) -> bool:
    """Whether a record is the routing itself: nested lists, or base64 of .npy."""
    if isinstance(record, str):
        return record.startswith(NPY_BASE64)
    return isinstance(record, list) and bool(record) and isinstance(record[0], list)


def _of_choices(record: dict[str, Any], where: str, start: int) -> Iterator[Answer]:
    """An OpenAI answer: of SGLang with `sglext`, of vLLM 0.21 with `prompt_routed_experts`, of a later vLLM."""
    usage = _object(record.get("usage"))
    details = _object(usage.get("prompt_tokens_details"))
    prompt, completion = _tokens(usage, "prompt_tokens", where), _tokens(usage, "completion_tokens", where)
    cached = _tokens(details, "cached_tokens", where) or 0
    choices = [choice for choice in record["choices"] if isinstance(choice, dict)]
    several = len(choices) > 1
    if isinstance(record.get("sglext"), dict):  # of the first choice only
        value = record["sglext"].get("routed_experts")
        yield Answer("sglang", where, value, prompt, None if several else completion, cached, start)
        return
    if record.get("prompt_routed_experts") is not None:
        yield Answer("vllm", f"{where}, prompt", record["prompt_routed_experts"], prompt, part="prompt")
    for number, choice in enumerate(choices):
        at, value = f"{where}, choice {number}", choice.get("routed_experts")
        length = _length(choice.get("token_ids"))
        own = length if length is not None else None if several else completion
        if "prompt_routed_experts" in record and isinstance(value, list):  # 0.21; later ones may still name the field
            follows = not number and record["prompt_routed_experts"] is not None
            yield Answer("vllm", at, value, prompt, own, part="generated", follows=follows)
        elif number and value is not None and prompt is None:
            mend = "log `usage` too, so that the prompt is not counted once per choice"
            raise TraceError("several choices without their number of tokens", where=at, mend=mend)
        else:
            yield Answer("vllm", at, value, prompt, own, max(cached, prompt or 0) if number else cached, start)


def _of_outputs(record: dict[str, Any], where: str, start: int) -> Iterator[Answer]:
    prompt, cached = _length(record.get("prompt_token_ids")), _tokens(record, "num_cached_tokens", where) or 0
    halves = record.get("prompt_routed_experts") is not None
    if halves:
        yield Answer("vllm", f"{where}, prompt", record["prompt_routed_experts"], prompt, part="prompt")
    for number, output in enumerate(output for output in record["outputs"] if isinstance(output, dict)):
        known = max(cached, prompt or 0) if number else cached
        value, length = output.get("routed_experts"), _length(output.get("token_ids"))
        part = "generated" if halves else "whole"
        follows = halves and not number
        yield Answer("vllm", f"{where}, output {number}", value, prompt, length, known, start, part, follows)


def _phases(answer: Answer, ids: np.ndarray, conversation: int) -> Iterator[Piece]:
    """Rows by phase, without those of the prefix cache; their number checked where it is known."""
    where, rows, prompt, completion = answer.where, len(ids), answer.prompt, answer.completion
    if answer.part == "prompt":
        _check_rows(where, rows, prompt, prompt)
        yield TopK(where, ids, "prefill", conversation=conversation)
    elif answer.part == "generated":
        _check_rows(where, rows, completion, None if completion is None else completion - 1)
        yield TopK(where, ids, "decode", conversation=conversation)
    elif prompt is None:
        yield TopK(where, ids, conversation=conversation)
    else:
        whole = None if completion is None else max(0, prompt + completion - 1 - answer.start)
        _check_rows(where, rows, whole, whole)
        border = min(rows, max(0, prompt - answer.start))
        first = min(border, max(0, answer.cached - answer.start))
        if first:
            yield Left(CACHED, first)
        yield TopK(where, ids[first:border], "prefill", first, conversation)
        yield TopK(where, ids[border:], "decode", border, conversation)


def _check_rows(where: str, rows: int, most: int | None, least: int | None) -> None:
    if most is not None and least is not None and not least <= rows <= most:
        raise TraceError(
            "an answer has a wrong number of routing rows",
            where=where,
            found=f"expected {most if least == most else f'{least} or {most}'}, found {rows}",
            mend="each token but the last sampled one has a row; if the request cut the front, log it with the answer",
        )


def _sglang_ids(answer: Answer, shape: MoeShape) -> np.ndarray:
    """int32 [tokens, layers, top_k] of base64 that has no header; every decoder layer is in it."""
    if isinstance(answer.value, list):
        return from_lists(answer.value, answer.where)
    if not isinstance(answer.value, str):
        found = f"expected base64, found {type(answer.value).__name__}"
        raise TraceError("routed_experts in an unknown form", where=answer.where, found=found)
    content = from_base64(answer.value, answer.where)
    row = 4 * shape.hidden_layers * shape.top_k
    if len(content) % row:
        raise TraceError(
            "routed_experts are no whole number of tokens",
            where=answer.where,
            found=f"expected a multiple of {row} B (int32, {shape.hidden_layers} layers, top-{shape.top_k}), "
            f"found {len(content):,} B",
            mend=OTHER_MODEL,
        )
    return np.frombuffer(content, "<i4").reshape(-1, shape.hidden_layers, shape.top_k)


def _start(request: Any) -> int:
    """Rows that the request had cut from the front."""
    if isinstance(request, str):
        try:
            request = json.loads(request)
        except (ValueError, RecursionError):
            return 0
    if not isinstance(request, dict):
        return 0
    for place in (request, *(request[key] for key in _NESTED if isinstance(request.get(key), dict))):
        for key in START_KEYS:
            if (start := _whole(place.get(key))) is not None:
                return start
    return 0


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _tokens(counts: dict[str, Any], key: str, where: str) -> int | None:
    """A number of tokens that an answer states; None where it states none. Raises TraceError for a negative one."""
    value = counts.get(key)
    if isinstance(value, int | float) and value < 0:
        mend = "log the engine's own numbers, or leave them out"
        raise TraceError("a negative number of tokens", where=f"{where}, {key}", found=f"found {value}", mend=mend)
    return _whole(value)


def _whole(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, list) else None
