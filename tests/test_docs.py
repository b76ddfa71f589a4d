"""The pages held to the code: links, options, constants, field names, messages; blocks marked `test` are run."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from moefit import errors
from moefit.calibrate import checkpoint as checkpoint_module
from moefit.calibrate import import_traces, importers, redact, splits, trace_set, traces
from moefit.calibrate.checkpoint import Checkpoint
from moefit.calibrate.layout import ARCHITECTURES, check_layout
from moefit.cli.main import HOLD_OUT, app, main
from moefit.cli.tables import build_text
from moefit.cli.traffic import KEEP_TOKENS
from moefit.fidelity.gate import Outcome, Policy
from moefit.fidelity.score import read_held_out
from moefit.packs import manifest as manifest_module
from moefit.packs.build import prepare
from moefit.packs.expert import ADJACENT_WEIGHT, ExpertReport
from moefit.packs.layout import pack_config, pack_layout
from moefit.packs.needs import BASE_MEMORY, needs
from moefit.packs.plan import OURS, STAY
from moefit.packs.recipe import Recipe
from moefit.packs.routing import MAX_SOURCES
from moefit.packs.shards import WEIGHT_SUFFIXES
from moefit.placement import aim, baselines, captures, drift, heldout, holdout, traffic_file, windows
from moefit.placement.captures import recording
from moefit.quantize import codebook as codebooks
from moefit.quantize.encode import CODE_SCALE, FIXED_POINT_UP_TO, REACH, RMS
from moefit.quantize.hadamard import BLOCK
from moefit.quantize.linear import Options, decode, stored_layout
from moefit.quantize.regularize import CODEBOOK_SCALE
from moefit.quantize.trellis import Bounds, unpack

from .calibrate.synthetic import REAL_CONFIG, header_only
from .small_model import Built, Inputs
from .test_architecture import MAY_IMPORT

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md"]
OUTSIDE = {"arxiv.org"}
"""Hosts that a page may link to."""
OTHERS = {
    "--additional-config",
    "--disable-shared-experts-fusion",
    "--enable-expert-parallel",
    "--enable-return-routed-experts",
    "--ep-dispatch-algorithm",
    "--ep-num-redundant-experts",
    "--ep-size",
    "--expert-distribution-recorder-mode",
    "--init-expert-location",
    "--kt-enable-dynamic-expert-update",
    "--kt-expert-placement-strategy",
    "--kt-gpu-experts-ratio",
    "--kt-num-gpu-experts",
    "--tensor-parallel-size",
    "--tp-size",
}
"""Options of serving engines."""


def read(name: str) -> str:
    return (ROOT / name).read_text()


def words(name: str) -> str:
    """A page with every run of white space as one space, so that a phrase may wrap."""
    return " ".join(read(name).split())


def blocks(name: str, info: str) -> list[str]:
    """Contents of the fenced blocks whose info string is `info`."""
    return re.findall(rf"^```{re.escape(info)}\n(.*?)^```$", read(name), re.M | re.S)


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def rows(text: str) -> list[list[str]]:
    """Cells of the table rows of a text, without header rows and rulers."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rulers = {number for number, line in enumerate(lines) if set(line) <= set("|-")}
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for number, line in enumerate(lines)
        if number not in rulers and number + 1 not in rulers
    ]


def section(name: str, heading: str) -> str:
    """The text under a heading, up to the next one of the same level or above."""
    text = prose(read(name))
    level = heading.split()[0]
    start = text.index(f"\n{heading}\n") + len(heading)
    after = re.search(rf"^#{{1,{len(level)}}} ", text[start:], re.M)
    return text[start : start + after.start()] if after else text[start:]


def quoted(text: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`\n]+)`", text)


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def options(command: Any) -> dict[str, str]:
    """`--name`, `-n` -> default as a page shows it."""
    shown = {}
    for parameter in command.params:
        if parameter.param_type_name != "option" or "--help" in parameter.opts:
            continue
        value = parameter.default
        text = ", ".join(value) if isinstance(value, list | tuple) else str(value)
        if parameter.required or value is None or value is False:
            text = "required" if parameter.required else ""
        shown[", ".join(parameter.opts)] = text
    return shown


# Links, paths, names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if "://" in target:
            assert target.split("/")[2] in OUTSIDE, target
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert file.is_relative_to(ROOT), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", prose(file.read_text()), re.M)
            assert anchor in map(slug, headings), target


def test_every_page_is_indexed() -> None:
    index = read("docs/README.md")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index, page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_paths_exist_and_are_of_the_repository(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"(?<![\w.)\]])/(work|tmp|home|root|mnt|usr|opt|Users)\b", text)
    assert "index-url" not in text
    for name in quoted(prose(text)):
        if re.fullmatch(rf"({'|'.join(MAY_IMPORT)}|tests|benchmarks|examples|docs|\.ci)/[\w./-]*", name):
            assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_and_make_targets_exist(page: Path) -> None:
    text = page.read_text()
    fenced = re.findall(r"^(?:\$ )?(moefit .*|make .*)$", text, re.M)
    targets = set(re.findall(r"^([a-z]+):", read("Makefile"), re.M))
    for line in [*quoted(prose(text)), *fenced]:
        if found := re.match(r"moefit ([a-z]+)", line):
            assert found[1] in commands(), line
        if found := re.match(r"make ([a-z]+)", line):
            assert found[1] in targets, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_options_that_pages_mention_exist(page: Path) -> None:
    known = {"--help", "--version", "--debug", "--out"}
    known |= OTHERS
    known |= {name for command in commands().values() for shown in options(command) for name in shown.split(", ")}
    for name in re.findall(r"(?<![\w-])--[a-z][a-z-]*", page.read_text()):
        assert name in known, name


# The command line


@pytest.mark.parametrize("command", commands())
def test_every_option_and_its_default_is_documented(command: str) -> None:
    heading = next(h for h in re.findall(r"^## .*$", read("docs/build.md"), re.M) if f"`moefit {command}" in h)
    table = {
        ", ".join(quoted(row[0])): row[1] for row in rows(section("docs/build.md", heading)) if row[0].startswith("`--")
    }
    assert table == options(commands()[command])


def test_global_options_are_documented() -> None:
    group: Any = typer.main.get_command(app)
    for parameter in group.params:
        assert parameter.opts[0] in read("docs/build.md")


def shell_examples() -> list[tuple[str, str]]:
    """Every command of the `console test` blocks, with what it prints."""
    parts = "".join(blocks("docs/build.md", "console test")).split("$ ")[1:]
    return [(command, output) for command, _, output in (part.partition("\n") for part in parts)]


@pytest.mark.parametrize(("command", "output"), shell_examples())
def test_console_examples(
    command: str, output: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", shlex.split(command))
    with pytest.raises(SystemExit) as end:
        main()
    printed = capfd.readouterr()
    assert printed.out + printed.err == output.rstrip("\n") + "\n"
    assert end.value.code == (2 if output.startswith("moefit: ") else 0)


def test_exit_codes() -> None:
    text = section("docs/build.md", "## Exit codes")
    table = {int(row[0]): row[1] for row in rows(text)}
    assert set(table) == {0, 1, 2, 3, 130}
    assert "passed" in table[Outcome.PASS.exit_code]
    assert "failed" in table[Outcome.FAIL.exit_code]
    assert "inconclusive" in table[Outcome.INCONCLUSIVE.exit_code]
    assert "interrupted" in table[130]


def test_refusals_are_quoted_as_they_are() -> None:
    source = " ".join(file.read_text() for room in MAY_IMPORT for file in (ROOT / room).rglob("*.py"))
    messages = [message for row in rows(section("docs/build.md", "## Refusals")) for message in quoted(row[0])]
    assert len(messages) > 20
    for message in messages:
        assert message in source, message


def test_summary_lines(mini_pack: Built) -> None:
    printed = build_text(mini_pack.manifest, mini_pack.result.seconds, mini_pack.path).splitlines()
    labels = [line[:14].strip() for line in printed if not line.startswith(" ")]
    table = section("docs/build.md", "### The summary")
    assert [quoted(row[0])[0] for row in rows(table)] == labels


# The formats


def test_exl3_constants() -> None:
    page = words("docs/exl3.md")
    for value in (codebooks.MUL1_MULTIPLIER, codebooks.MCG_MULTIPLIER):
        assert f"0x{value:08X}`" in page
    sizes = [sum(b for _, _, b in stored_layout(k, n, 3.0, "mul1").values()) for k, n in ((5120, 2304), (2304, 5120))]
    assert f"takes {sizes[0]:,} B" in page
    assert f"of three such {2 * sizes[0] + sizes[1]:,} B" in page
    assert f"multiples of {BLOCK}" in page
    assert f"REACH = {REACH} positions away" in page
    assert f"Up to K = {FIXED_POINT_UP_TO:g} the bounds are 8 bits wide" in page
    assert f"times {CODE_SCALE:g} x 2^K / RMS (of the codebook: {RMS['mul1']:g} or {RMS['mcg']:g})" in page
    assert f"kept costs capped at {Bounds.CAP}" in page
    assert f"raises the smallest by more than {Bounds.MOST_GROWTH} has" in page
    assert f"`CODEBOOK_SCALE`: {CODEBOOK_SCALE['mul1'][3.0]:g} for `mul1` at K = 3" in page
    assert f"gets {Options().damping:g} of its mean diagonal added" in page


@pytest.fixture(scope="module")
def exl3_page() -> dict[str, Any]:
    """Names that the page's test blocks define, run one after the other."""
    names: dict[str, Any] = {}
    for block in blocks("docs/exl3.md", "python test"):
        exec(block, names)
    return names


@pytest.mark.parametrize(
    ("codebook", "bits"),
    [
        *((c, k) for c in codebooks.CODEBOOKS for k in codebooks.INTEGER_BITS),
        *(("mul1", k) for k in codebooks.HALF_BITS),
    ],
)
def test_exl3_reader_of_the_page(exl3_page: dict[str, Any], codebook: codebooks.Codebook, bits: float) -> None:
    assert np.array_equal(exl3_page["codebook"](codebook).view(np.uint16), codebooks.table(codebook).view(np.uint16))
    random = np.random.default_rng(int(2 * bits))
    trellis = random.integers(-(1 << 15), 1 << 15, (16, 8, int(16 * bits)), dtype=np.int16)  # [256, 128]
    suh, svh = random.normal(size=256).astype(np.float16), random.normal(size=128).astype(np.float16)
    assert np.array_equal(exl3_page["states"](trellis), unpack(trellis, bits))
    ours = decode(trellis, suh, svh, codebook).numpy()
    assert np.abs(exl3_page["weight"](trellis, suh, svh, codebook) - ours).max() < 1e-5 * np.abs(ours).max()


def test_pack_config(tiny_v41: Path) -> None:
    written = pack_config(Checkpoint.open(tiny_v41).config, Recipe())["quantization_config"]
    v41, other = (json.loads(block) for block in blocks("docs/pack.md", "json"))
    assert v41 == json.loads(json.dumps(written))
    config = {"architectures": ["Qwen3MoeForCausalLM"]}
    assert pack_config(config, Recipe()) == config | {"quantization_config": other}


def test_families_page() -> None:
    table = rows(prose(read("docs/families.md")).split("## ")[0])
    assert sorted(name for row in table for name in quoted(row[0])) == sorted(ARCHITECTURES)


def test_pack_files_and_fields(mini_pack: Built, mini: Inputs, tmp_path: Path) -> None:
    page = read("docs/pack.md")
    known = set(quoted(page))
    for key in mini_pack.manifest:
        assert key in known, key
    for name in ("recipe", "sizes", "calibration", "plan", "fidelity"):
        for key in mini_pack.manifest[name]:
            assert key in known or f"{name}.{key}" in known, f"{name}.{key}"
    for name in ("coverage", "rungs", "proxy_error"):
        for key in mini_pack.manifest["calibration"][name]:
            assert key in known, f"{name}.{key}"
    for rung in mini_pack.manifest["calibration"]["rungs"].values():
        assert rung.keys() <= known
    for corpus in mini_pack.manifest["fidelity"]["corpora"].values():
        assert corpus.keys() <= known
    assert {field.name for field in fields(ExpertReport)} <= known
    assert {field.name for field in fields(Recipe)} <= known
    assert prepare(mini.request(tmp_path / "pack")).identity.keys() <= known
    for path in mini_pack.path.rglob("*"):
        companion = (mini.model / path.relative_to(mini_pack.path)).is_file() and path.name != "config.json"
        if path.is_file() and path.suffix != ".safetensors" and not (companion and "index" not in path.name):
            assert path.relative_to(mini_pack.path).as_posix() in known, path


def test_pack_constants() -> None:
    page = words("docs/pack.md")
    assert f"version {manifest_module.VERSION}" in page.splitlines()[0]
    assert f'`"{manifest_module.FORMAT}"`, `{manifest_module.VERSION}`' in page
    assert f"more than {manifest_module.MAX_BYTES >> 20} MiB" in page
    assert f"three samples of {checkpoint_module.SAMPLE_BYTES >> 10} KiB" in words("docs/receipt.md")
    for suffix in WEIGHT_SUFFIXES:
        assert f"`*{suffix}`" in page


def test_traces_constants() -> None:
    page = words("docs/traces.md")
    protocol = {name: p.default for name, p in inspect.signature(read_held_out).parameters.items()}
    assert f"`--window` tokens ({Recipe().window})" in page
    assert f"up to {Recipe().prior_tokens:,} tokens" in page
    assert f"Each counts {ADJACENT_WEIGHT:g} of a natural token" in words("docs/build.md")
    assert f"n, {ADJACENT_WEIGHT:g} a and shrinkage over their sum" in words("docs/pack.md")
    assert f"the {HOLD_OUT}th, {2 * HOLD_OUT}th, {3 * HOLD_OUT}th" in page
    assert f"at most {protocol['per_document']} windows of up to {protocol['window']} tokens" in page
    assert f"windows under {protocol['shortest']} tokens" in page
    assert f"at least {Policy(1.0).min_documents} per corpus" in page
    assert f"up to {traces.SPARE_SHARE:.0%}".replace("%", " %") in page


def test_imports_of_the_traces_page() -> None:
    page = words("docs/traces.md")
    formats = [quoted(row[0])[0] for row in rows(section("docs/traces.md", "## What is imported"))]
    assert sorted(formats) == sorted(importers.NAMES)
    columns = [name for row in rows(section("docs/traces.md", "## The trace set")) for name in quoted(row[0])]
    assert columns == trace_set.SCHEMA.names
    assert f'`"{trace_set.FORMAT}"`, `version` {trace_set.VERSION}' in page
    assert f"a row group per {trace_set.ROW_GROUP_TOKENS:,} tokens" in page
    assert f"file above {importers.files.MAX_RECORD >> 20} MiB" in page
    assert f"above {import_traces.MAX_CONVERSATION:,} characters" in page
    assert f"the first {import_traces.LISTED};" in page
    assert f"`--max-bad` ({import_traces.ImportRequest((), ROOT, None).max_bad:.0%})".replace("%", " %") in page
    for name in (redact.NEW_KEY, redact.NEW_EMAIL, redact.NEW_HOME, *splits.PARTS):
        assert f"`{name}`" in page


def test_captures_page() -> None:
    page = words("docs/captures.md")
    formats = [quoted(row[0])[0] for row in rows(section("docs/captures.md", "## Formats"))]
    assert sorted(formats) == sorted(captures.NAMES)
    assert f"at least {captures.SAME_TOKENS} tokens" in page
    assert f"2^{captures.tally.LIMIT.bit_length() - 1} and more" in page
    assert f"above {2 / np.finfo(np.float32).eps:,.0f} in float32" in page
    for name in captures.responses.START_KEYS:
        assert f"`{name}`" in page


def test_traffic_page() -> None:
    page = words("docs/traffic.md")
    assert f"versions 1 to {traffic_file.VERSION}" in page
    assert f"windows of 1 to {windows.MAX_WINDOW} tokens" in page
    names = {name for row in rows(read("docs/traffic.md")) for name in quoted(row[0])}
    assert names == {
        *("counts", "layers", "prefill", "decode", "sources"),
        *traffic_file.WINDOWS,
        *(traffic_file.OF_SOURCES + name for name in traffic_file.WINDOWS[1:]),
        *traffic_file.RECORDED,
    }
    assert f"({KEEP_TOKENS:,} tokens if nothing is said" in page
    assert recording.LONGEST_SHARE == 8 and "longer than an eighth of what is kept" in page
    assert f"at least {drift.FEW} conversations" in page
    assert f"{drift.CLEAR} times the floor and more" in page
    assert drift.HOT == 3 and "busiest third" in page
    assert f"the {MAX_SOURCES} of most tokens" in page


def test_placement_page() -> None:
    page = words("docs/placement.md")
    columns, placements = section("docs/placement.md", "## What the numbers mean").split("| row | placement |")
    none = heldout.Interval(0, None, None)
    row_of_plan = heldout.Row(OURS, 1, 0, 0, none, 0, 0, 0, 0, none, none, 0, None, "")
    head = heldout.comparison_text([row_of_plan]).splitlines()[1]
    assert len(rows(columns)) == 5
    for row in rows(columns):
        assert quoted(row[0])[0] in head
    names = [quoted(row[0])[0] for row in rows("| row | placement |" + placements)]
    assert names == [OURS, STAY, *baselines.BASELINES, heldout.ORACLE]
    objectives = [quoted(row[0])[0] for row in rows(section("docs/placement.md", "## Which objective"))]
    assert {aim.Aim.parse(name.replace(":W", ":2")).terms[0].measure for name in objectives} == set(aim.UNITS)
    assert f"under {heldout.FEW} conversations" in page
    assert f"under {holdout.FEWEST} recorded conversations" in page
    assert f"it is {100 * heldout.LEAST_GAIN:g} % or more" in page
    assert f"up to {KEEP_TOKENS:,} tokens" in page


def test_needs_of_the_build_page(tiny_v41: Path, tmp_path: Path) -> None:
    assert f"{BASE_MEMORY / (1 << 30):.1f} GiB" in words("docs/build.md")
    models = {"`examples/tiny-v41`": tiny_v41, "DeepSeek-V4.1-Flash": header_only(tmp_path, REAL_CONFIG)}
    table = rows(section("docs/build.md", "### Disk, memory, time"))
    assert len(table) == 3
    sources = {name: Checkpoint.open(path) for name, path in models.items()}
    layouts = {name: pack_layout(source, check_layout(source), Recipe()) for name, source in sources.items()}
    for name, tokens, threads, disk, memory in table:
        need = needs(sources[name], layouts[name], Recipe(), int(tokens.replace(",", "")), int(threads))
        for said, value in ((disk, need.disk), (memory, need.memory)):
            digits = len(said.partition(".")[2].removesuffix(" GB"))
            assert said == f"{value / 1e9:.{digits}f} GB"
    for name, layout in layouts.items():
        sizes = layout.layout
        tiles = sizes.layers * sizes.experts * 3 * sizes.hidden * sizes.intermediate // 256
        assert f"{name} has {tiles:,} tiles" in words("docs/build.md") or f"{name} {tiles:,}." in words("docs/build.md")


# The house


def test_rooms_of_contributing() -> None:
    table = rows(section("CONTRIBUTING.md", "## Where things are"))
    said = {quoted(row[0])[0]: set(row[2].replace("nothing", "").replace(" ", "").split(",")) - {""} for row in table}
    assert said == MAY_IMPORT


def test_errors_have_the_four_parts_that_contributing_names() -> None:
    assert list(inspect.signature(errors.MoefitError.__init__).parameters)[1:] == ["what", "where", "found", "mend"]
    assert "what, where (file, tensor, line), expected against found, the mend" in words("CONTRIBUTING.md")


def test_changelog_begins_with_the_version() -> None:
    version = tomllib.loads(read("pyproject.toml"))["project"]["version"]
    assert re.findall(r"^## (\S+)", read("CHANGELOG.md"), re.M)[0] == version
