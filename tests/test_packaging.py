"""The wheel is whole, installs without a network and runs outside the checkout; the locks pin what it needs by hash."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest

from limpet.demo.catalogue import Shop
from limpet.demo.site import running

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "limpet"
LOCKS = sorted((ROOT / "requirements").glob("*.txt"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

#: One requirement of a lock: name, version, marker if there is one, and its hashes on lines of their own.
LOCKED = re.compile(r"(?P<name>[a-z0-9][a-z0-9.-]*)==(?P<version>[^ ;\\]+)(?: ; [^\\]+)?(?: \\\n {4}--hash=sha256:[0-9a-f]{64})+\n")


@dataclass(frozen=True)
class Installed:
    """An environment outside the checkout that has the wheel, and a folder to work in."""

    folder: Path

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, without a network index and without this checkout on its path."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LIMPET_", "PIP_", "VIRTUAL_"))}
        command = [str(self.folder / "bin" / program), *arguments]
        return subprocess.run(command, cwd=self.folder, env=kept, capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built with the backend that is installed here."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel in a fresh environment that borrows what it depends on from this one, so that no network is needed."""
    folder = tmp_path_factory.mktemp("outside")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--no-index", "--no-deps", str(wheel)], check=True, capture_output=True, timeout=120)
    packages = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    # A .pth file adds a folder, but not what that folder's own .pth files add: the editable install here stays unseen.
    (packages / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return Installed(folder)


# -- the wheel -----------------------------------------------------------------------------


def test_the_wheel_holds_the_package_whole_and_nothing_else(wheel: Path) -> None:
    """Every file of src/limpet, the SQL and the typing marker among them, the licences, and no test."""
    wanted = {
        f"limpet/{path.relative_to(PACKAGE).as_posix()}"
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"limpet/py.typed", "limpet/demo/site.py", "limpet/store/sql/core.sql"} <= wanted
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    information = f"limpet-{PROJECT['version']}.dist-info"
    assert {name for name in names if not name.startswith(information)} == wanted
    assert {f"{information}/licenses/LICENSE", f"{information}/licenses/NOTICE", f"{information}/entry_points.txt"} <= names


def test_the_installed_package_is_the_wheel_and_finds_its_files(installed: Installed) -> None:
    """Outside the checkout `limpet` comes from the fresh environment, and its SQL can be read there."""
    lines = (
        "import limpet, importlib.resources as r",
        "print(limpet.__file__)",
        "print(r.files('limpet.store').joinpath('sql/core.sql').read_text()[:0] + 'read')",
    )
    done = installed.run("python", "-c", "\n".join(lines))
    assert done.returncode == 0, done.stderr
    origin, read = done.stdout.split()
    assert Path(origin).is_relative_to(installed.folder)
    assert read == "read"


def test_the_installed_command_tells_its_version_and_its_commands(installed: Installed) -> None:
    """`limpet --version` and `limpet --help` work outside the checkout."""
    told, helped = installed.run("limpet", "--version"), installed.run("limpet", "--help")
    assert (told.returncode, helped.returncode) == (0, 0), told.stderr + helped.stderr
    assert PROJECT["version"] in told.stdout
    assert {"crawl", "run", "demo", "verify", "export"} <= set(re.findall(r"[a-z]+", helped.stdout))


def test_the_installed_demo_shop_says_its_truth(installed: Installed) -> None:
    """The shop comes with the package."""
    done = installed.run("python", "-m", "limpet.demo.site", "truth", "--products", "3", "--port", "80")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [*Shop(port=80, products=3).truth()]


def test_the_installed_command_crawls_and_exports(installed: Installed) -> None:
    """With no code at all: every page of a small shop, each once."""
    database = f"sqlite:///{installed.folder / 'pages.db'}"
    with running(Shop(products=15, hosts=1)) as site:
        crawled = installed.run("limpet", "crawl", site.shop.starts()[0], "--db", database)
        assert crawled.returncode == 0, crawled.stderr
        exported = installed.run("limpet", "export", "page", "--db", database, "--format", "jsonl")
    assert exported.returncode == 0, exported.stderr
    urls = [json.loads(line)["url"] for line in exported.stdout.splitlines()]
    assert sorted(urls) == sorted([*site.shop.listing_urls(), *map(site.shop.url, range(15))])


# -- the locks -----------------------------------------------------------------------------


def locked(lock: Path) -> dict[str, str]:
    """What a lock pins: name and version."""
    return {found["name"]: found["version"] for found in LOCKED.finditer(lock.read_text(encoding="utf-8"))}


def named(requirements: list[str]) -> set[str]:
    """The names of requirements as pyproject.toml and *.in files spell them, normalised."""
    found = (re.match(r"[A-Za-z0-9._-]+", line.strip()) for line in requirements)
    return {re.sub(r"[-_.]+", "-", match.group()).lower() for match in found if match}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.name)
def test_a_lock_pins_every_line_by_hash_and_names_no_index(lock: Path) -> None:
    """Nothing but pinned requirements with hashes and comments: no option, no address, no path."""
    text = lock.read_text(encoding="utf-8")
    rest = [line for line in LOCKED.sub("", text).splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert rest == []
    assert locked(lock)
    assert not re.search(r"://|index-url|find-links|trusted-host", text)


def test_the_locks_cover_what_is_asked_for_and_agree() -> None:
    """Every dependency and extra stands in dev.txt, the former in runtime.txt too, in the same version."""
    requirements = ROOT / "requirements"
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    asked = (requirements / "dev.in").read_text(encoding="utf-8").splitlines()
    runtime, dev, lock = (locked(requirements / f"{name}.txt") for name in ("runtime", "dev", "lock"))
    assert named(PROJECT["dependencies"]) <= runtime.keys()
    assert named([*PROJECT["dependencies"], *extras, *asked]) <= dev.keys()
    assert runtime.items() <= dev.items()
    assert "pip-tools" in lock


def test_this_environment_is_the_locked_one() -> None:
    """The suite runs on the versions of dev.txt: `make setup` brings an older environment up to date."""
    pinned = locked(ROOT / "requirements" / "dev.txt")
    assert {name: version(name) for name in pinned} == pinned


def test_every_package_that_is_imported_is_declared() -> None:
    """No module of Limpet leans on a package that only happens to be installed."""
    owners = packages_distributions()
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    declared = named([*PROJECT["dependencies"], *extras, "limpet"])
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for top in {name.split(".")[0] for name in names} - {*sys.stdlib_module_names, "annotationlib"}:
                assert named(owners.get(top, [top])) & declared, f"{path.relative_to(ROOT)} imports {top}, which is not declared"
