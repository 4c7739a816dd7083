"""The documents say what the code does: pages, settings, links, commands, study files and Python blocks."""

from __future__ import annotations

import re
import shlex
import textwrap
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import click
import pytest
import typer

from fedloom.cli import STUDY_OPTIONS, app
from fedloom.registry import SLOTS, entries
from fedloom.runs.start import sections_of
from fedloom.runs.study import override, read, resolve

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
# Others of this session may have registered methods of their own; the documents are about the package's.
METHODS = {name: entry for name, entry in entries("method").items() if entry.path.startswith("fedloom.")}
SHELLS = ("sh", "console")
COMMANDS: click.Group = typer.main.get_command(app)  # type: ignore[assignment]


class Block(NamedTuple):
    """A fenced block: where it is, what language it says, what it holds."""

    place: str
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    found, lines = [], page.read_text().splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if start is None:
            start = number
        else:
            language = lines[start].strip().removeprefix("```")
            found.append(Block(f"{page.relative_to(ROOT)}:{start + 1}", language, "\n".join(lines[start + 1 : number])))
            start = None
    assert start is None, f"{page} has a fence that is not closed"
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]


def of(*languages: str):
    chosen = [block for block in BLOCKS if block.language in languages]
    return pytest.mark.parametrize("block", chosen, ids=[block.place for block in chosen])


def commands(block: Block) -> list[list[str]]:
    """The words after `fedloom` of every command line: all lines of sh blocks, lines after `$` of console blocks."""
    found: list[list[str]] = []
    if block.language not in SHELLS:
        return found
    for line in block.text.replace("\\\n", " ").splitlines():
        if block.language == "console" and not line.startswith("$ "):
            continue
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words and words[0].split("/")[-1] == "fedloom":
            found.append(words[1:])
    return found


LINES = [(block.place, words) for block in BLOCKS for words in commands(block)]
every_line = pytest.mark.parametrize(("place", "words"), LINES, ids=[f"{place} {' '.join(w)}" for place, w in LINES])


def own_settings(name: str) -> list[str]:
    return [field["name"] for field in METHODS[name].fields if field["name"] not in SLOTS]


def test_there_is_something_to_check():
    assert len(PAGES) > len(METHODS) >= 10
    assert len(LINES) >= 30


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_has_a_page_that_names_its_settings(name):
    page = DOCS / "methods" / f"{name}.md"
    assert page.is_file(), f"write docs/methods/{name}.md"
    text = page.read_text()
    missing = [setting for setting in own_settings(name) if f"`{setting}`" not in text]
    assert not missing, f"docs/methods/{name}.md does not name {missing}"
    assert "## Must equal" in text
    assert any(words[1:2] == [name] or name in words for block in blocks(page) for words in commands(block))


def test_every_page_is_about_a_method():
    assert {page.stem for page in (DOCS / "methods").glob("*.md")} == set(METHODS)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_index_and_front_page_know_every_method(name):
    assert f"(methods/{name}.md)" in (DOCS / "README.md").read_text()
    assert re.search(rf"^\| \[`{name}`\]\(docs/methods/{name}\.md\) \|.*\| done \|$", README, re.MULTILINE)


README = (ROOT / "README.md").read_text()


def test_nothing_planned_is_there_already():
    planned = re.findall(r"^\| (.*) \|.*\| planned \|$", README, re.MULTILINE)
    names = {name for row in planned for name in re.findall(r"`([\w.]+)`", row)}
    there = {name for kind in ("method", "select", "engine") for name in entries(kind)}
    assert not names & there, "the front page calls planned what the registry has"


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.relative_to(ROOT)} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page.relative_to(ROOT)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_paths_of_one_machine(page):
    assert not re.findall(r"(?<![\w.])/(?:work|tmp|home|root|Users)/\S*", page.read_text())


def test_pictures_are_small_and_used():
    text = "".join(page.read_text() for page in PAGES)
    for picture in (DOCS / "pictures").iterdir():
        assert picture.stat().st_size < 150_000, picture.name
        assert f"pictures/{picture.name}" in text, picture.name


@every_line
def test_command_lines_parse(place, words):
    """The command and its options exist and take these values; nothing is run."""
    name, *arguments = words
    if name.startswith("-"):
        command: click.Command = COMMANDS
        arguments = list(words)
    else:
        assert name in COMMANDS.commands, f"{place}: no command '{name}'"
        command = COMMANDS.commands[name]
    try:
        with suppress(click.exceptions.Exit):  # --help and --version
            command.make_context(f"fedloom {name}", arguments)
    except click.ClickException as error:
        pytest.fail(f"{place}: fedloom {' '.join(words)}: {error.format_message()}")


@every_line
def test_studies_of_command_lines_are_sound(place, words):
    """What `run` and `compare` are told makes a study; data are not loaded and nothing is run."""
    name, *arguments = words
    if name not in ("run", "compare") or "--help" in arguments:
        return
    given = COMMANDS.commands[name].make_context(name, list(arguments)).params
    options = {key: given[key] for key in STUDY_OPTIONS if key != "settings"}
    files = [ROOT / word for word in given["what"] if word.endswith(".toml")]
    sections = override(read(files[0]) if files else {}, given["settings"] or [])
    methods = [word for word in given["what"] if not word.endswith(".toml")]
    for method in methods or [None]:
        of_method = {**sections, "method": {"name": method}} if name == "compare" else sections
        resolve(sections_of(method, options, of_method))


@of("toml")
def test_study_files_are_sound(block):
    resolve(tomllib.loads(block.text))


def test_the_first_study_is_the_one_in_the_text():
    page = DOCS / "first-study.md"
    told = "\n".join(block.text for block in blocks(page) if block.language == "toml")
    assert tomllib.loads(told) == tomllib.loads((ROOT / "examples" / "first_study.toml").read_text())


@of("python")
def test_python_blocks_compile(block):
    compile(textwrap.dedent(block.text), block.place, "exec")


def test_the_own_method_is_the_one_in_the_text():
    source = (ROOT / "examples" / "mymethod.py").read_text()
    for name in ("class Pull", "class Careful", "def fixed", "def report"):
        piece = next(b.text for b in BLOCKS if b.place.startswith("docs/own-method.md") and name in b.text)
        assert piece[piece.index(name) :].strip() in source, f"{name} differs from examples/mymethod.py"
