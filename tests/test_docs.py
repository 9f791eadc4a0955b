"""The docs are true: what they say of the code is made from the code, and what they tell a reader to do is done here.

Tables between `<!-- table: NAME -->` and `<!-- end -->` are made by `TABLES`; `python -m tests.test_docs` writes them anew.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest

import limpet
from limpet import failpoint, task
from limpet.cli import main
from limpet.cli.arguments import parser
from limpet.cli.configuration import flag_of
from limpet.cli.exits import Exit
from limpet.demo.catalogue import Shop
from limpet.demo.site import listen
from limpet.engine.load import load
from limpet.settings import documented
from limpet.store.proofs import FAULTS, Remedy
from limpet.url import OPTIONS, options_of

ROOT = Path(__file__).parent.parent
DOCS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
#: Pages whose console blocks are run, and whose Python blocks make the files that those blocks need.
RUN = ("README.md", "docs/quickstart.md")
#: Features that are not there yet: each paragraph that names one says so.
PLANNED = r"Bloom|I10"
SAYS_SO = r"planned|later|not built|Not built|not on|none \||reserved|come with"
UNBUILT = ["consume", "reparse", "ui"]
#: What other programs take, where a command of ours does not.
FOREIGN_FLAGS = {"--upgrade", "--help", "--version", "--only", "--list"}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str


@cache
def text_of(page: str) -> str:
    """The text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def name_of(path: Path) -> str:
    """A page's path from the root."""
    return path.relative_to(ROOT).as_posix()


PAGES = [name_of(path) for path in DOCS]


def blocks(page: str, language: str) -> list[Block]:
    """The fenced blocks of a page in one language."""
    found = re.finditer(r"^```(\w+)\n(.*?)^```$", text_of(page), re.MULTILINE | re.DOTALL)
    made = [Block(page, text_of(page)[: match.start()].count("\n") + 1, match[1], match[2]) for match in found]
    return [block for block in made if block.language == language]


def paragraphs(page: str) -> Iterator[str]:
    """What stands together: a paragraph, an item of a list, a row of a table, with the heading above it."""
    heading = ""
    for piece in re.split(r"\n\s*\n|\n(?=[-*|] |\d+\. )|\n(?=\|)", text_of(page)):
        if piece.startswith("#"):
            heading = piece.partition("\n")[0]
        yield f"{heading}\n{piece}"


def prose(page: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)


# -- what is made from the code ------------------------------------------------------------


def commands() -> dict[str, argparse.ArgumentParser]:
    """Every command, with its parser."""
    action = next(a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def rows(head: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" if row else f"|{'---|' * len(head)}" for row in (head, (), *lines))


def shown(value: object) -> str:
    """A default as the table has it."""
    if isinstance(value, tuple):
        return ", ".join(f"{each:g}" for each in value)
    return str(value).lower() if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else f"{value:g}"


def settings_table() -> str:
    """Every setting with its flag, default and meaning."""
    lines = []
    for name, (default, doc) in documented().items():
        flags = [flag_of(name), *([f"--no-{flag_of(name)[2:]}"] if isinstance(default, bool) else [])]
        lines.append((f"`{name}`", ", ".join(f"`{flag}`" for flag in flags), shown(default), doc))
    return rows(("setting", "flag", "default", "meaning"), lines)


def arguments(command: argparse.ArgumentParser, *, common: bool = False) -> list[tuple[str, ...]]:
    """The arguments of a command that are its own, or those that every command has; never those of settings."""
    of_all = {action.dest for action in _group(command, "everywhere")}
    settings = {action.dest for action in _group(command, "settings")}
    lines: list[tuple[str, ...]] = []
    for action in command._actions:
        if action.dest == "help" or action.dest in settings or (action.dest in of_all) is not common:
            continue
        value = "" if action.nargs == 0 else str(action.metavar or "|".join(action.choices or ()) or action.dest)
        name = f"{', '.join(action.option_strings)} {value}".strip() if action.option_strings else value
        lines.append((f"`{name}`".replace("|", "\\|"), (action.help or "").replace("|", "\\|")))
    return lines


def _group(command: argparse.ArgumentParser, title: str) -> list[argparse.Action]:
    return [action for group in command._action_groups if group.title == title for action in group._group_actions]


def command_table(name: str) -> str:
    """The arguments of one command."""
    command = commands()[name]
    lines = arguments(command)
    if _group(command, "settings"):
        lines.append(("settings", "every flag of [settings.md](settings.md#all-settings)"))
    return rows(("argument", "meaning"), lines) if lines else "No arguments of its own."


def faults_table() -> str:
    """Every fault that a proof can find."""
    lines = [
        (f"`{word}`", fault.invariant, fault.meaning, f"`{fault.remedy}`" if fault.remedy else "none") for word, fault in FAULTS.items()
    ]
    return rows(("fault", "invariant", "meaning", "repair"), lines)


def failpoints_table() -> str:
    """Every failpoint, by where it is."""
    places = {
        "commit": failpoint.COMMIT_STEPS,
        "take-over": failpoint.TAKEOVER_STEPS,
        "making a job": failpoint.JOB_STEPS,
        "the loop": failpoint.ENGINE_STEPS,
        "gc": failpoint.GC_STEPS,
    }
    assert {name for names in places.values() for name in names} == set(failpoint.NAMES)
    return rows(("where", "failpoints"), [(place, ", ".join(f"`{name}`" for name in names)) for place, names in places.items()])


TABLES: dict[str, Callable[[], str]] = {
    "settings": settings_table,
    "faults": faults_table,
    "failpoints": failpoints_table,
    "everywhere": lambda: rows(("argument", "meaning"), arguments(commands()["status"], common=True)),
    "diagram": lambda: f"```mermaid\n{task.mermaid()}\n```",
    **{f"command {name}": lambda name=name: command_table(name) for name in commands()},  # type: ignore[misc]
}
_TABLE = re.compile(r"(<!-- table: ([a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def made_anew(page: str) -> str:
    """A page with its tables as the code has them."""
    return _TABLE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text_of(page))


@pytest.mark.parametrize("page", PAGES)
def test_every_table_is_as_the_code_has_it(page: str) -> None:
    """Settings, flags, faults, failpoints and the state diagram; `python -m tests.test_docs` writes them anew."""
    assert text_of(page) == made_anew(page)


def test_every_table_stands_somewhere() -> None:
    """No command, setting, fault or failpoint is left out of the docs."""
    there = [found[2] for page in PAGES for found in _TABLE.finditer(text_of(page))]
    assert sorted(there) == sorted(TABLES)


def test_every_command_has_a_heading_its_one_line_and_an_example() -> None:
    """docs/commands.md says of each command what its help says, and shows a call of it."""
    parts = re.split(r"^### limpet ", text_of("docs/commands.md"), flags=re.MULTILINE)[1:]
    assert [part.partition("\n")[0] for part in parts] == list(commands())
    for part in parts:
        name = part.partition("\n")[0]
        assert str(commands()[name].description).rstrip(".") in " ".join(part.split()), name
        assert re.search(rf"^\$ limpet {name}\b", part, re.MULTILINE), name


def test_options_of_keys_remedies_exit_codes_and_dependencies_are_all_told() -> None:
    """Tables with words of their own still have a row for each thing, and none for anything else."""
    profiles = [options_of(name) for name in ("exact", "standard", "aggressive")]
    for option in OPTIONS:
        marks = " | ".join("on" if profile[option] else "off" for profile in profiles)
        assert f"| `{option}` | {marks} |" in text_of("docs/urls.md")
    for remedy in Remedy:
        assert f"| `{remedy}` |" in text_of("docs/verify.md") or not remedy
    assert re.findall(r"^\| (\d) \|", text_of("docs/operating.md"), re.MULTILINE) == [str(int(code)) for code in Exit]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = sorted(re.split(r"[><=;\[]", line)[0].strip() for line in project["dependencies"])
    told = text_of("ARCHITECTURE.md").partition("## 13. Dependencies")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `([a-z-]+)` \|", told, re.MULTILINE)) == wanted
    spiders = text_of("docs/spiders.md")
    assert [name for name in limpet.__all__ if f"`{name}`" not in spiders] == []


def test_every_module_has_a_line_in_the_architecture() -> None:
    """A module that is not in the map is one that nobody finds; a line without its module leads nowhere."""
    told = text_of("ARCHITECTURE.md")
    package = ROOT / "src" / "limpet"
    modules = [path.relative_to(package).as_posix() for path in package.rglob("*.py")]
    mapped = [name for name in modules if not name.startswith(("cli/", "demo/")) and "__init__" not in name]
    assert [name for name in mapped if f"`{name}`" not in told] == []
    for page in PAGES:
        for path in re.findall(r"`((?:[\w-]+/)*[\w-]+\.(?:py|sql|toml|md))`", prose(page)):
            is_ours = "/" in path or path in modules
            assert not is_ours or (ROOT / path).exists() or (package / path).exists(), f"{page} names {path}"


def test_every_invariant_names_a_test_that_exists() -> None:
    """I1 to I9 each have a test that proves it; every test that the docs name is there."""
    parts = re.split(r"^### (I\d+)", text_of("ARCHITECTURE.md"), flags=re.MULTILINE)[1:]
    by_name = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(by_name) == ["I1", "I2", "I3", "I4", "I5", "I6", "I7", "I8", "I9", "I10"]
    for name, part in by_name.items():
        assert "::test_" in part.partition("\n## ")[0] or "later" in part, name
    for page in PAGES:
        for file, function in re.findall(r"(tests/[\w/]+\.py)::(\w+)", text_of(page)):
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, f"{file}::{function}"


# -- links and words -----------------------------------------------------------------------


def anchors(page: str) -> set[str]:
    """What `#...` may lead to on a page, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    """A relative link is a file of the repository, and its anchor a heading there."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        place = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert place.exists(), target
        assert not anchor or anchor in anchors(name_of(place)), target


def test_the_readme_leads_to_every_page() -> None:
    """No page is an island."""
    linked = {target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text_of("README.md"))}
    assert {page for page in PAGES if page != "README.md"} <= linked


@pytest.mark.parametrize("page", PAGES)
def test_what_is_not_there_yet_is_told_as_planned(page: str) -> None:
    """Nobody is promised a database, command or feature that this release does not have."""
    for part in paragraphs(page):
        for word in re.findall(rf"\b(?:{PLANNED})\b|`limpet (?:{'|'.join(UNBUILT)})`", part):
            assert re.search(SAYS_SO, part), f"{page} speaks of {word}: {part}"


@pytest.mark.parametrize("page", PAGES)
def test_every_command_line_that_is_shown_would_be_taken(page: str) -> None:
    """Calls of limpet parse; make has its targets; flags in the text are flags of some command."""
    targets = re.findall(r"^([a-z]+):", text_of("Makefile"), re.MULTILINE)
    for step in [step for block in blocks(page, "console") for step in steps_of(block)]:
        words = [word for word in shlex.split(step.command) if not re.match(r"[A-Z_]+=", word) and word != "&"]
        if words[0] == "limpet":
            parser().parse_args(words[1 : words.index(">")] if ">" in words else words[1:])
        elif words[0] == "make":
            assert words[1] in targets
    known = {flag for command in commands().values() for action in command._actions for flag in action.option_strings}
    for flag in re.findall(r"`[^`]*?(--[a-z][a-z-]*)", prose(page)):
        assert flag in known | FOREIGN_FLAGS, flag
    for name in re.findall(r"`(?:\.venv/bin/)?limpet ([a-z]+)\b", prose(page)):
        assert name in commands() or name in UNBUILT, name
    assert set(re.findall(r"`make ([a-z]+)", prose(page))) <= set(targets)


# -- what a reader is told to do -----------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One command of a console block: what it exits with, and what is shown of its output."""

    command: str
    code: int
    output: list[str]


def steps_of(block: Block) -> list[Step]:
    """The commands of a block; `# exits 6` after one says what it ends with."""
    steps: list[Step] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            command, _, remark = line[2:].partition("  # ")
            steps.append(Step(command, int(re.findall(r"^exits (\d)", remark)[0]) if remark else 0, []))
        else:
            steps[-1].output.append(line)
    return steps


def bare(line: str) -> str:
    """A line without what differs from run to run: numbers, digests, widths."""
    line = re.sub(r"\b[0-9a-f]{64}\b", "#", line)
    return " ".join(re.sub(r"[0-9][0-9,.:]*", "#", line).split())


def files_of(page: str) -> dict[str, str]:
    """The Python blocks of a page: those that name their file in the first line, and the others numbered."""
    found = {}
    for block in blocks(page, "python"):
        named = re.match(r"# (\w+\.py)\n", block.text)
        found[named[1] if named else f"block_{Path(page).stem}_{block.line}.py"] = block.text
    return found


@pytest.mark.parametrize("page", RUN)
def test_every_console_block_does_what_it_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A reader who types what stands there, in a folder with the files that stand there, sees what stands there."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("LIMPET_")]:
        monkeypatch.delenv(name)
    shop, sockets = listen(Shop(hosts=1))
    for socket in sockets:
        socket.close()
    for name, text in files_of(page).items():
        Path(name).write_text(text.replace(":8800", f":{shop.port}"), encoding="utf-8")
    steps = [step for block in blocks(page, "console") for step in steps_of(block)]
    steps = [replace(step, command=step.command.replace("8800", str(shop.port))) for step in steps]
    served: list[subprocess.Popen[str]] = []
    ran = 0
    try:
        for step in steps:
            if step.command.startswith(("make ", ". ", ".venv/")):
                continue  # the set-up, which is done: the tests run in it
            if step.command.endswith(" &"):
                served.append(_started(step))
                continue
            code, output = _done(step, capsys)
            assert code == step.code, f"{step.command}: {output}"
            assert {bare(line) for line in step.output} <= {bare(line) for line in output.splitlines()}, f"{step.command}: {output}"
            for file in tmp_path.glob("*.py"):  # what a command wrote looks for the shop where it is told to be
                file.write_text(file.read_text(encoding="utf-8").replace(":8800", f":{shop.port}"), encoding="utf-8")
            ran += 1
    finally:
        for child in served:
            child.send_signal(signal.SIGTERM)
            child.communicate(timeout=30)
    assert ran
    assert served


def _done(step: Step, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and output of a command; one of ours is called in this process, which saves a second of imports."""
    program, *words = shlex.split(step.command)
    if program != "limpet":
        command = [sys.executable, "-m", program, *words]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        return ended.returncode, ended.stdout + ended.stderr
    capsys.readouterr()
    code = main(words)
    return code, "".join(capsys.readouterr())


def _started(step: Step) -> subprocess.Popen[str]:
    """A command of Python's in the background, once it has said its first line."""
    python, *words = shlex.split(step.command.removesuffix(" &"))
    assert python == "python"
    child = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert child.stdout
    assert bare(child.stdout.readline()) == bare(step.output[0]), step.command
    return child


def test_every_python_block_runs_and_type_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is a whole file: a spider loads, a test passes, and mypy in strict mode has no objection to any."""
    files = {name: text for page in PAGES for name, text in files_of(page).items()}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    tests = [name for name in files if name.startswith("test_")]
    spiders = [name for name, text in files.items() if ".page(" in text and name not in tests]
    assert {"shop.py", "lamps.py"} < set(spiders)
    for name in spiders:
        assert load(tmp_path / name).spider.handler_names()
    for name in set(files) - set(spiders) - set(tests):
        if "limpet.open(" not in files[name]:  # needs a database; mypy reads it all the same
            runpy.run_path(name)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout
    source = Path(limpet.__file__).parents[1]
    options = ["--strict", "--follow-imports=silent", "--config-file=", f"--cache-dir={ROOT / '.mypy_cache' / 'docs'}"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *files],
        env={**os.environ, "MYPYPATH": str(source)}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_the_figures_have_their_place() -> None:
    """What was measured stands in one place, with the command that measured it."""
    measured = text_of("docs/guarantees.md").partition("## Measured")[2]
    assert "<!-- figures -->" in measured


if __name__ == "__main__":
    for each in PAGES:
        (ROOT / each).write_text(made_anew(each), encoding="utf-8")
