"""The style rules that a machine can check: sizes, names, docstrings, and what may stand nowhere.

Each rule is a function from one file to its findings, and each has a planted offence below that it must find: a rule that
never fires passes everything.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

import limpet

ROOT = Path(__file__).parent.parent
FILE_LINES_MAX = 500
#: A file of tests may be longer: it is read one test at a time, and tests of one promise belong beside each other and their set-up.
TEST_LINES_MAX = 800
FUNCTION_LINES_MAX = 70

#: Folders that hold what tools leave behind, and test data that others wrote.
SKIPPED = {".git", ".venv", "__pycache__", "build", "dist", "vectors", "node_modules"}
#: A module with such a name is a drawer; a module is a noun of the field.
DRAWERS = {"base", "common", "core", "helper", "helpers", "manager", "misc", "types", "util", "utils"}
#: Words that name the place where the code was written, or an index that packages came from. Spelled apart, as this
#: file is searched, too.
PLACES = [
    "/" + "work/",
    "../" + "shared",
    "py" + "pi.org",
    "python" + "hosted",
    "npm" + "js.org",
    "deb." + "debian",
    "/tmp/" + "bash",
]
#: The one file that may know the folder of originals beside the checkout.
KNOWS_SHARED = ".ci/run"
#: The one module that runs a file of the user's, which is what it is for.
RUNS_SPIDERS = "src/limpet/engine/load.py"
#: How a test says what must be.
VERDICT = r"\b(assert|raises|check|expect|verify|fail)"
#: So long a sleep is no waiting, but something that never ends by itself, and that a test ends.
FOR_EVER_S = 1000
UNFINISHED = ["TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK"]
#: Modules without input, output, clock and lots, as import-linter has them. What needs no import is looked for here.
PURE = {"credentials", "errors", "settings", "url_tables", "url", "scope", "task", "columns", "record", "batch", "policy", "schedule"}

#: What `from limpet import ...` offers. A name is added or taken away here, in CHANGELOG and in the docs at once.
PUBLIC = [
    "Anchor",
    "Blocked",
    "Call",
    "Dead",
    "DeadTask",
    "FetchError",
    "HandlerRevoked",
    "Http",
    "KeyProfile",
    "LimpetError",
    "Missing",
    "OwnershipLost",
    "Page",
    "RecordError",
    "Reply",
    "Request",
    "Retry",
    "SiteRule",
    "Skip",
    "Spider",
    "Start",
    "StoreError",
    "Tariff",
    "Tx",
    "UsageError",
    "call",
    "field",
    "open",
    "places",
    "record",
]


@dataclass(frozen=True)
class Source:
    """One file of the repository: its path from the root, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree of a Python file."""
        return ast.parse(self.text)

    @property
    def is_python(self) -> bool:
        """Whether it is Python."""
        return self.path.endswith(".py")

    @property
    def is_product(self) -> bool:
        """Whether it is part of the package."""
        return self.is_python and self.path.startswith("src/")

    @property
    def is_test(self) -> bool:
        """Whether pytest collects it."""
        return self.is_python and Path(self.path).name.startswith("test_")

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """Every function, nested ones and methods included."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))

    def calls(self) -> Iterator[tuple[int, str, str]]:
        """Every call: its line, what is called as it is spelled, and the whole call."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield node.lineno, ast.unparse(node.func), ast.unparse(node)

    def imports(self) -> Iterator[tuple[int, str]]:
        """Every module that is imported: its line and its dotted name."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.lineno, node.module
                yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


Rule = Callable[[Source], Iterator[str]]


# -- the rules -----------------------------------------------------------------------------


def long_file(source: Source) -> Iterator[str]:
    """A module has one idea."""
    lines, most = source.text.count("\n"), TEST_LINES_MAX if source.path.startswith("tests/") else FILE_LINES_MAX
    if source.is_python and lines > most:
        yield f"{lines} lines, at most {most}"


def long_function(source: Source) -> Iterator[str]:
    """A function fits on a screen or two."""
    for node in source.functions() if source.is_python else ():
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > FUNCTION_LINES_MAX:
            yield f"{node.lineno}: {node.name} has {lines} lines, at most {FUNCTION_LINES_MAX}"


def drawer(source: Source) -> Iterator[str]:
    """A module is a noun of the field."""
    parts = {Path(source.path).stem, *Path(source.path).parts[:-1]} if source.is_python else set()
    yield from (f"{name} is a drawer, not a noun of the field" for name in sorted(parts & DRAWERS))


def names_a_place(source: Source) -> Iterator[str]:
    """The repository is whole by itself, and any index serves its packages."""
    for number, line in enumerate(source.text.splitlines(), 1):
        for place in PLACES:
            if place in line and not (source.path == KNOWS_SHARED and "shared" in place):
                yield f"{number}: names {place}"


def unfinished(source: Source) -> Iterator[str]:
    """What is to be done is an issue, not a comment."""
    for number, line in enumerate(source.text.splitlines(), 1):
        yield from (f"{number}: holds {word}" for word in UNFINISHED if re.search(rf"\b{word}\b", line))


def runs_data_as_code(source: Source) -> Iterator[str]:
    """No pickle and no eval: a database of another's making must never run code here."""
    if not source.is_product or source.path == RUNS_SPIDERS:
        return
    for line, module in source.imports():
        if module.split(".")[0] in ("pickle", "marshal", "shelve", "dill", "cloudpickle"):
            yield f"{line}: imports {module}"
    for line, called, whole in source.calls():
        if called in ("eval", "exec", "compile", "os.system", "__import__") or "shell=True" in whole:
            yield f"{line}: calls {called}"


def undocumented(source: Source) -> Iterator[str]:
    """Every module, and every public class, function and method of the package, says what it is for."""
    if not source.is_product:
        return
    if ast.get_docstring(source.tree) is None and source.tree.body:
        yield "1: the module has no docstring"
    waiting: list[ast.Module | ast.ClassDef] = [source.tree]
    while waiting:
        for node in waiting.pop().body:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
                continue
            if not _is_another_form(node) and ast.get_docstring(node) is None:
                yield f"{node.lineno}: {node.name} has no docstring"
            if isinstance(node, ast.ClassDef):
                waiting.append(node)


def _is_another_form(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is an overload or the setter of a property, whose first form has the docstring."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any(name.endswith(("overload", ".setter", ".deleter", ".register")) for name in decorators)


def test_says_nothing(source: Source) -> Iterator[str]:
    """Every test has a line that states its promise, and something that can fail, in it or in a function it shares."""
    if not source.is_test:
        return
    judges = {node.name for node in source.functions() if re.search(VERDICT, ast.unparse(node))}
    for node in source.functions():
        if node.name.startswith("test_"):
            if ast.get_docstring(node) is None:
                yield f"{node.lineno}: {node.name} has no line saying what it promises"
            if node.name not in judges and not judges & set(re.findall(r"\w+", ast.unparse(node))):
                yield f"{node.lineno}: {node.name} asserts nothing that can be seen"


test_says_nothing.__test__ = False  # type: ignore[attr-defined]  # a rule about tests, not one


def sleeps(source: Source) -> Iterator[str]:
    """Tests wait for a condition, not for a time."""
    for node in ast.walk(source.tree) if source.is_test else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "asyncio.sleep", "sleep"):
            seconds = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            if not isinstance(seconds, int | float) or 0 < seconds < FOR_EVER_S:
                yield f"{node.lineno}: {ast.unparse(node)}"


def mocks(source: Source) -> Iterator[str]:
    """Real servers and real databases."""
    for line, module in source.imports() if source.path.startswith("tests/") and source.is_python else ():
        if "mock" in module.split("."):
            yield f"{line}: imports {module}"


def impure(source: Source) -> Iterator[str]:
    """Pure modules neither ask the time nor open a file, which takes no import that the layers could forbid."""
    if source.path.startswith("src/limpet/") and Path(source.path).stem in PURE and source.path.count("/") == 2:
        for line, called, _ in source.calls():
            if called in ("open", "input") or called.endswith((".now", ".today", ".utcnow", ".open", ".read_text")):
                yield f"{line}: calls {called}"


def speaks_sql(source: Source) -> Iterator[str]:
    """SQL stands in the store alone, driver or no driver."""
    if not source.is_product or source.path.startswith("src/limpet/store/"):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = re.search(r"\b(SELECT\s.+\sFROM|INSERT\s+INTO|UPDATE\s+\w+\s+SET|DELETE\s+FROM)\b", node.value, re.DOTALL)
            if found:
                yield f"{node.lineno}: speaks SQL: {found.group(1)[:40]!r}"


RULES: list[Rule] = [
    long_file,
    long_function,
    drawer,
    names_a_place,
    unfinished,
    runs_data_as_code,
    undocumented,
    test_says_nothing,
    sleeps,
    mocks,
    impure,
    speaks_sql,
]


# -- the repository keeps them -------------------------------------------------------------


def repository() -> Iterator[Source]:
    """Every text file that is part of the repository, and not what a tool left in it."""
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        is_hidden = any(part.startswith(".") and part != ".ci" for part in parts[:-1])
        if not is_hidden and not SKIPPED & set(parts) and path.is_file():
            try:
                yield Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                continue


@pytest.fixture(scope="module")
def sources() -> list[Source]:
    """The repository's files, each read and parsed once."""
    return [*repository()]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_repository_keeps_the_rule(rule: Rule, sources: list[Source]) -> None:
    """No file of the repository offends against a rule of style."""
    found = [f"{source.path}:{finding}" for source in sources for finding in rule(source)]
    assert not found, "\n".join(["", *found])


def test_the_repository_is_seen_whole(sources: list[Source]) -> None:
    """The rules look at the package, the tests, the SQL, the CI script and the docs, and not at the environment."""
    seen = {source.path for source in sources}
    assert seen >= {
        "src/limpet/errors.py",
        "tests/test_tidy.py",
        KNOWS_SHARED,
        "Makefile",
        "pyproject.toml",
        "requirements/dev.txt",
    }
    assert any(path.endswith(".sql") for path in seen)
    assert not any(".venv" in path or "__pycache__" in path for path in seen)


LONG = "def f() -> None:\n" + "    pass\n" * FUNCTION_LINES_MAX
TEST = 'def test_x() -> None:\n    """A promise."""\n    '
OFFENCES: list[tuple[Rule, str, str]] = [
    (long_file, "src/limpet/a.py", "\n" * (FILE_LINES_MAX + 1)),
    (long_file, "tests/test_a.py", "\n" * (TEST_LINES_MAX + 1)),
    (long_function, "bench/a.py", LONG),
    (long_function, "src/limpet/a.py", "class A:\n" + "\n".join("    " + line for line in LONG.splitlines())),
    (drawer, "src/limpet/utils.py", ""),
    (drawer, "src/limpet/common/web.py", ""),
    *((names_a_place, "README.md", f"see {place}x") for place in PLACES),
    (names_a_place, KNOWS_SHARED, "cd /" + "work/main"),
    *((unfinished, "Makefile", f"# {word}: later") for word in UNFINISHED),
    (runs_data_as_code, "src/limpet/a.py", "from pickle import loads"),
    (runs_data_as_code, "src/limpet/a.py", "x = eval('1')"),
    (runs_data_as_code, "src/limpet/a.py", "subprocess.run('ls', shell=True)"),
    (undocumented, "src/limpet/a.py", "x = 1"),
    (undocumented, "src/limpet/a.py", '"""A."""\nclass A:\n    pass'),
    (undocumented, "src/limpet/a.py", '"""A."""\nclass A:\n    """A."""\n    async def b(self): ...'),
    (test_says_nothing, "tests/test_a.py", "def test_x() -> None:\n    assert 1"),
    (test_says_nothing, "tests/test_a.py", TEST + "print(1)"),
    (test_says_nothing, "tests/test_a.py", TEST + "shared()\ndef shared(): print(1)"),
    (sleeps, "tests/test_a.py", TEST + "time.sleep(1)"),
    (sleeps, "tests/test_a.py", TEST + "time.sleep(seconds)"),
    (sleeps, "tests/test_a.py", "async def helper():\n    await asyncio.sleep(0.1)"),
    (mocks, "tests/store/a.py", "from unittest import mock"),
    (mocks, "tests/test_a.py", "from unittest.mock import patch"),
    (impure, "src/limpet/url.py", "datetime.now(UTC)"),
    (impure, "src/limpet/record.py", "open('x')"),
    (speaks_sql, "src/limpet/engine/a.py", "q = 'SELECT a\\nFROM b'"),
    (speaks_sql, "src/limpet/cli/a.py", "q = f'DELETE FROM {table}'"),
]
GOOD: list[tuple[Rule, str, str]] = [
    (long_file, "tests/test_a.py", "\n" * TEST_LINES_MAX),
    (long_function, "src/limpet/a.py", LONG.replace("    pass\n", "", 1)),
    (names_a_place, KNOWS_SHARED, "x=../" + "shared"),
    (runs_data_as_code, RUNS_SPIDERS, "exec(compiled)"),
    (runs_data_as_code, "src/limpet/a.py", "re.compile('x')\nmodel.eval()"),
    (undocumented, "src/limpet/a.py", '"""A."""\nclass _A:\n    def b(self): ...\ndef _c(): ...'),
    (undocumented, "src/limpet/a.py", '"""A."""\n@overload\ndef c(): ...\ndef c():\n    """C."""\n    def inner(): ...'),
    (undocumented, "tests/a.py", "x = 1"),
    (test_says_nothing, "tests/test_a.py", TEST + "with pytest.raises(ValueError): f()"),
    (test_says_nothing, "tests/test_a.py", TEST + "shared()\ndef shared(): assert 1"),
    (sleeps, "tests/test_a.py", TEST + "await asyncio.sleep(0)"),
    (sleeps, "tests/test_a.py", "def blocks(): time.sleep(1e6)"),
    (impure, "src/limpet/engine/url.py", "datetime.now(UTC)"),
    (speaks_sql, "src/limpet/store/a.py", "q = 'SELECT a FROM b'"),
    (speaks_sql, "src/limpet/a.py", "q = 'Update the selected rows from b'"),
]


@pytest.mark.parametrize(("rule", "path", "text"), OFFENCES)
def test_each_rule_finds_a_planted_offence(rule: Rule, path: str, text: str) -> None:
    """No rule is blind."""
    assert [*rule(Source(path, text))]


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_each_rule_lets_pass_what_is_near_an_offence(rule: Rule, path: str, text: str) -> None:
    """No rule cries over what it allows."""
    assert not [*rule(Source(path, text))]


def test_every_rule_has_a_planted_offence() -> None:
    """A rule that was never seen to fire does not count."""
    assert {rule.__name__ for rule, _, _ in OFFENCES} == {rule.__name__ for rule in RULES}


def test_the_public_names_are_the_listed_ones() -> None:
    """What `from limpet import ...` offers changes on purpose only; each name has its docstring."""
    assert sorted(limpet.__all__) == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(limpet, name).__doc__, name
