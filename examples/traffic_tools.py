"""The tools of the scripted conversations: small, real, standard library only.

Each takes the project folder first and then the arguments the assistant gives; it returns the text that goes
into the record. What it raises becomes the text "error: ...". Results are the same in Python 3.11 to 3.13.
"""

from __future__ import annotations

import ast
import base64
import calendar
import codecs
import configparser
import csv
import difflib
import hashlib
import inspect
import json
import operator
import re
import sqlite3
import statistics
import subprocess
import sys
import textwrap
import tomllib
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import date, timedelta
from pathlib import Path

SNIPPET_SECONDS = 60  # far more than any snippet needs, so that a busy machine changes nothing
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONIOENCODING": "utf-8"}

# Runs every test_* function of a file and prints one line each: the same in every Python version, unlike
# unittest's own report.
TEST_RUNNER = """
import runpy, sys
tests = {k: v for k, v in runpy.run_path(sys.argv[1]).items() if k.startswith("test_")}
failed = 0
for name, test in tests.items():
    try:
        test()
        print("ok  ", name)
    except Exception as error:
        failed += 1
        print("FAIL", name, type(error).__name__, error)
print(len(tests) - failed, "passed,", failed, "failed")
"""


def inside(root: Path, path: str) -> Path:
    found = (root / path).resolve()
    if not found.is_relative_to(root):
        raise ValueError(f"{path} is outside the project")
    if found != root and not found.exists() and not found.parent.is_dir():
        raise ValueError(f"no such folder: {Path(path).parent}")
    return found


def lines_of(root: Path, path: str) -> list[str]:
    file = inside(root, path)
    if not file.is_file():
        raise ValueError(f"no such file: {path}")
    return file.read_text(encoding="utf-8").splitlines()


def json_of(root: Path, path: str) -> typing.Any:
    try:
        return json.loads("\n".join(lines_of(root, path)))
    except json.JSONDecodeError:  # whose own words and position changed in Python 3.13
        raise ValueError(f"{path} is not valid JSON") from None


def files_below(root: Path, folder: str) -> Iterator[Path]:
    return (p for p in sorted(inside(root, folder).rglob("*")) if p.is_file())


def list_files(root: Path, folder: str = ".") -> str:
    """List all files below a folder, with sizes in bytes."""
    found = [f"{p.relative_to(root).as_posix()} {p.stat().st_size}" for p in files_below(root, folder)]
    return "\n".join(found) or "no files"


def read_file(root: Path, path: str, first: int = 1, last: int = 60) -> str:
    """Read lines of a text file; each line is shown with its number."""
    lines = lines_of(root, path)
    shown = [f"{n}| {line}" for n, line in enumerate(lines, 1) if first <= n <= last]
    rest = len(lines) - last
    return "\n".join(shown + [f"({rest} more lines)"] * (rest > 0)) or "(nothing in that range)"


def grep(root: Path, pattern: str, folder: str = ".") -> str:
    """Search all files below a folder for a regular expression."""
    hits = []
    for file in [inside(root, folder)] if inside(root, folder).is_file() else files_below(root, folder):
        name = file.relative_to(root).as_posix()
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(pattern, line):
                hits.append(f"{name}:{number}: {line.strip()}")
    return "\n".join(hits) or "no match"


def write_file(root: Path, path: str, content: str) -> str:
    """Create or overwrite a text file."""
    inside(root, path).write_text(content + "\n", encoding="utf-8")
    return f"wrote {len(content.splitlines())} lines to {path}"


def unified(before: list[str], after: list[str], left: str, right: str) -> str:
    return "\n".join(difflib.unified_diff(before, after, left, right, lineterm="", n=1)) or "no difference"


def edit_file(root: Path, path: str, old: str, new: str) -> str:
    """Replace a passage that occurs exactly once in a file; returns a diff."""
    before = "\n".join(lines_of(root, path)) + "\n"
    if before.count(old) != 1:
        raise ValueError(f"the passage occurs {before.count(old)} times in {path}, expected once")
    after = before.replace(old, new)
    inside(root, path).write_text(after, encoding="utf-8")
    return unified(before.splitlines(), after.splitlines(), f"a/{path}", f"b/{path}")


def diff_files(root: Path, left: str, right: str) -> str:
    """Unified diff of two files."""
    return unified(lines_of(root, left), lines_of(root, right), left, right)


def snippet(root: Path, *arguments: str) -> str:
    # -S: no site-packages, so that only the standard library and the project's own files can be imported.
    command = [sys.executable, "-S", "-c", *arguments]
    try:
        done = subprocess.run(
            command, cwd=root, env=ENVIRONMENT, capture_output=True, encoding="utf-8", timeout=SNIPPET_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"error: stopped after {SNIPPET_SECONDS} s"
    out = done.stdout.rstrip()
    if done.returncode:
        # Tracebacks differ between Python versions; the place and the last line do not.
        places = re.findall(r'File "([^"]+)", line (\d+)', done.stderr) or [("?", "?")]
        file, line = places[-1]
        file = file.replace(str(root), "").lstrip("/").replace("<string>", "snippet")
        out += f"\n{done.stderr.strip().splitlines()[-1]} ({Path(file).name}, line {line})"
    return out.replace(str(root), "/project").strip() or "(no output)"


def run_python(root: Path, code: str) -> str:
    """Run a Python snippet in the project folder (standard library only) and return what it prints."""
    return snippet(root, code)


def run_tests(root: Path, path: str) -> str:
    """Run the test functions of one file."""
    lines_of(root, path)
    return snippet(root, TEST_RUNNER, path)


OPERATORS: dict[type, Callable[..., float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg,
}  # fmt: skip


def calculate(root: Path, expression: str) -> str:
    """Evaluate an arithmetic expression: numbers, + - * / // % ** and brackets."""

    def value(node: ast.expr) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return number
            case ast.BinOp(left, op, right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(op, operand) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(operand))
        raise ValueError(f"not arithmetic: {ast.unparse(node)}")

    result = value(ast.parse(expression, mode="eval").body)
    return f"{result:.10g}" if isinstance(result, float) else str(result)


def json_query(root: Path, path: str, query: str) -> str:
    """Read a part of a JSON file, for example days[0].rain; [*] takes all elements."""
    found: list[typing.Any] = [json_of(root, path)]
    for key, index in re.findall(r"([\w-]+)|\[(\*|-?\d+)\]", query):
        if key:
            if missing := [v for v in found if not isinstance(v, dict) or key not in v]:
                raise ValueError(f"no key {key} in {json.dumps(missing[0])[:60]}")
            found = [v[key] for v in found]
        else:
            found = [w for v in found for w in v] if index == "*" else [v[int(index)] for v in found]
    return json.dumps(found if "[*]" in query else found[0], ensure_ascii=False)


def csv_summary(root: Path, path: str, column: str, by: str = "") -> str:
    """Count, sum, mean, minimum and maximum of a numeric CSV column, optionally per group."""
    rows = list(csv.DictReader(lines_of(root, path)))
    for name in filter(None, [column, by]):
        if name not in rows[0]:
            raise ValueError(f"no column {name}; columns are {', '.join(rows[0])}")
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row[by] if by else "all", []).append(float(row[column]))
    return "\n".join(
        f"{name}: n={len(v)} sum={sum(v):.6g} mean={statistics.fmean(v):.6g} min={min(v):g} max={max(v):g}"
        for name, v in sorted(groups.items())
    )


def sql(root: Path, tables: list, query: str) -> str:
    """Load CSV files as tables named after the files into an in-memory SQLite database and run one query."""
    base = sqlite3.connect(":memory:")
    for path in tables:
        header, *rows = csv.reader(lines_of(root, path))
        base.execute(f"CREATE TABLE {Path(path).stem} ({', '.join(f'{h} NUMERIC' for h in header)})")
        base.executemany(f"INSERT INTO {Path(path).stem} VALUES ({', '.join('?' * len(header))})", rows)
    cursor = base.execute(query)
    names = [d[0] for d in cursor.description]
    return "\n".join(" | ".join(map(str, row)) for row in [names, *cursor.fetchall()])


def month_calendar(root: Path, year: int, month: int) -> str:
    """Print the calendar of a month."""
    return "\n".join(line.rstrip() for line in calendar.TextCalendar().formatmonth(year, month).splitlines())


def date_math(root: Path, start: str, days: int = 0, end: str = "") -> str:
    """Add days to a date, or count the days to an end date (both YYYY-MM-DD)."""
    first = date.fromisoformat(start)
    last = date.fromisoformat(end) if end else first + timedelta(days=days)
    working = sum((first + timedelta(days=n)).weekday() < 5 for n in range((last - first).days))
    return (
        f"{first:%a} {first} to {last:%a} {last}: {(last - first).days} days, {working} working days, "
        f"ISO week {last.isocalendar().week}"
    )


def try_regex(root: Path, pattern: str, samples: list) -> str:
    """Show for each sample whether the whole text matches, and the groups."""
    found = [(s, re.fullmatch(pattern, s)) for s in samples]
    return "\n".join(f"{s!r}: {'match ' + str(m.groups()) if m else 'no match'}" for s, m in found)


def count_words(root: Path, path: str, top: int = 5) -> str:
    """Count lines, words and characters of a file and list its most frequent long words."""
    lines = lines_of(root, path)
    words = re.findall(r"[^\W\d_]+", " ".join(lines).lower())
    often = Counter(w for w in words if len(w) > 3).most_common(top)
    shown = ", ".join(f"{w} {n}" for w, n in sorted(often, key=lambda p: (-p[1], p[0])))
    return f"{len(lines)} lines, {len(words)} words, {sum(map(len, lines))} characters; {shown}"


def find_records(root: Path, path: str, where: dict) -> str:
    """Find the records of a JSON table whose fields equal the given values."""
    records = json_of(root, path)
    found = [json.dumps(r) for r in records if all(r.get(k) == v for k, v in where.items())]
    return "\n".join(found) or "no record"


def update_record(root: Path, path: str, id: str, changes: dict) -> str:
    """Change fields of one record of a JSON table; locked records and unknown fields are refused."""
    records = json_of(root, path)
    record = next((r for r in records if r["id"] == id), None)
    if record is None:
        raise ValueError(f"no record {id}")
    if record["locked"]:
        raise ValueError(f"{id} is locked")
    if unknown := sorted(set(changes) - set(record)):
        raise ValueError(f"unknown field {unknown[0]}; fields are {', '.join(record)}")
    record.update(changes)
    inside(root, path).write_text(json.dumps(records), encoding="utf-8")
    return json.dumps(record)


def read_config(root: Path, path: str, key: str) -> str:
    """Read section.key from an INI or TOML file."""
    text, (section, name) = "\n".join(lines_of(root, path)), key.split(".")
    if path.endswith(".toml"):
        return str(tomllib.loads(text)[section][name])
    parser = configparser.ConfigParser()
    parser.read_string(text)
    return parser[section][name]


def bar_chart(root: Path, values: dict) -> str:
    """Draw named numbers as horizontal bars."""
    longest = max(values.values())
    return "\n".join(f"{k:<12} {'#' * round(30 * v / longest)} {v:g}" for k, v in values.items())


def checksum(root: Path, path: str, algorithm: str = "sha256") -> str:
    """Hash a file."""
    data = ("\n".join(lines_of(root, path)) + "\n").encode()
    return f"{algorithm} {hashlib.new(algorithm, data).hexdigest()} {path}"


def transcode(root: Path, text: str, codec: str) -> str:
    """Encode a text as base64, hex or rot13, or decode it with unbase64."""
    data = text.encode()
    if codec == "unbase64":
        return base64.b64decode(text, validate=True).decode()
    ways = {
        "base64": base64.b64encode(data).decode(),
        "hex": data.hex(" "),
        "rot13": codecs.encode(text, "rot13"),
    }
    if codec not in ways:
        raise ValueError(f"unknown codec {codec}; one of {', '.join(ways)}, unbase64")
    return ways[codec]


def wrap_text(root: Path, width: int, text: str) -> str:
    """Re-wrap a paragraph to a line width."""
    return textwrap.fill(" ".join(text.split()), width)


TOOLS: dict[str, Callable[..., str]] = {
    f.__name__: f
    for f in (
        list_files, read_file, grep, write_file, edit_file, diff_files, run_python, run_tests, calculate,
        json_query, csv_summary, sql, month_calendar, date_math, try_regex, count_words, find_records,
        update_record, read_config, bar_chart, checksum, transcode, wrap_text,
    )
}  # fmt: skip
JSON_TYPES = {str: "string", int: "integer", list: "array", dict: "object"}


def tool_schema(name: str) -> dict:
    """The OpenAI function description of a tool, from its signature and docstring."""
    function, hints = TOOLS[name], typing.get_type_hints(TOOLS[name])
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": function.__doc__,
            "parameters": {
                "type": "object",
                "properties": {p.name: {"type": JSON_TYPES[hints[p.name]]} for p in parameters},
                "required": [p.name for p in parameters if p.default is p.empty],
            },
        },
    }


def call_tool(root: Path, name: str, arguments: dict) -> str:
    try:
        return TOOLS[name](root, **arguments)
    except Exception as error:  # whatever a tool says is part of the record
        return f"error: {error}"
