"""From a path to a spider: what cannot be loaded is said with file and line, and nothing is left behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from limpet.engine.load import code_digest, code_of, load
from limpet.errors import UsageError

HEAD = "from limpet.engine.spider import Spider\nshop = Spider('shop')\n"
SHOP = HEAD + "@shop.page()\ndef listing(page, tx): ...\n"


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """The path and the modules of this process, as they were."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def written(folder: Path, **files: str) -> Path:
    """Files of a spider; the path of shop.py."""
    for name, text in files.items():
        file = folder / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder / "shop.py"


def test_a_spider_is_loaded_by_its_path(tmp_path: Path) -> None:
    """With where it came from, and the digest of its code."""
    file = written(tmp_path, shop=SHOP)
    loaded = load(file)
    assert loaded.spider.name == "shop"
    assert loaded.spider.handler_names() == ("listing",)
    assert loaded.file == file
    assert loaded.code == code_digest(file) == code_of(loaded.spider)
    assert len(loaded.code) == 16


def test_a_spider_file_hides_no_module_of_its_name(tmp_path: Path) -> None:
    """json.py is a fine name for a spider; json stays what it was."""
    before = sys.modules["json"]
    written(tmp_path, shop="", json=SHOP)
    assert load(tmp_path / "json.py").spider.name == "shop"
    assert sys.modules["json"] is before
    assert "shop" not in sys.modules


def test_annotations_are_found_in_a_loaded_file(tmp_path: Path) -> None:
    """Record classes look their module up by name, also where annotations are text."""
    text = (
        "from __future__ import annotations\nfrom decimal import Decimal\nfrom limpet.record import record\n"
        + SHOP
        + "@record(key='price')\nclass Product:\n    price: Decimal\n"
    )
    loaded = load(written(tmp_path, shop=text))
    assert loaded.spider.record_types()["product"].columns[0].kind == "decimal"


MISTAKES = [
    ("x = (\n", r"shop\.py:1: .*never closed"),
    (HEAD + "boom\n", r"shop\.py:3: NameError: name 'boom'"),
    ("import no_such_module\n", r"shop\.py:1: ModuleNotFoundError: No module named 'no_such_module'"),
    (HEAD + "@shop.page('p')\ndef f(page): ...\n", r"shop\.py:3: pattern 'p': expected a path"),
    (HEAD + "raise SystemExit(3)\n", r"shop\.py:3: ends the process while it is loaded; put main\(\) below"),
    ("x = 1\n", r"shop\.py: holds no Spider"),
    (SHOP + "other = Spider('other')\n", r"shop\.py: holds several spiders \(shop, other\)"),
    (HEAD, r"shop\.py: spider shop has no handler"),
    ("x = '\0'\n", r"shop\.py:?.* null bytes"),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES, ids=[message[:30] for _, message in MISTAKES])
def test_what_cannot_be_loaded_is_said_with_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    """And no module of it stays behind."""
    before = set(sys.modules)
    with pytest.raises(UsageError, match=message):
        load(written(tmp_path, shop=text))
    left = {name for name in set(sys.modules) - before if "shop" in name}
    assert not left or "holds" in message or "handler" in message


@pytest.mark.parametrize(("path", "message"), [("nowhere.py", "no such file"), (".", "is a folder")])
def test_a_path_that_is_no_file_is_said(tmp_path: Path, path: str, message: str) -> None:
    """Missing, or a folder."""
    with pytest.raises(UsageError, match=message):
        load(tmp_path / path)


def test_one_of_several_spiders_is_chosen_by_name(tmp_path: Path) -> None:
    """The same object under two names is one spider."""
    text = SHOP + "again = shop\nother = Spider('other')\nother.page()(listing)\n"
    file = written(tmp_path, shop=text)
    assert load(file, name="other").spider.name == "other"
    with pytest.raises(UsageError, match="no spider 'third'; it has shop, other"):
        load(file, name="third")


def test_a_file_that_runs_itself_while_it_is_loaded_is_said(tmp_path: Path) -> None:
    """main() without the guard would load it again, and again."""
    text = SHOP + f"from limpet.engine.load import load\nload({str(tmp_path / 'shop.py')!r})\n"
    with pytest.raises(UsageError, match="__main__"):
        load(written(tmp_path, shop=text))


def test_modules_beside_the_file_are_imported(tmp_path: Path) -> None:
    """As by `python FILE`, whatever the working directory, in handlers too."""
    text = "from models import NAME\n" + SHOP + "def late():\n    import later\n    return later.X\n"
    loaded = load(written(tmp_path, shop=text, models="NAME = 'm'", later="X = 7"))
    assert next(iter(loaded.spider.functions())).__globals__["late"]() == 7


def test_two_folders_with_modules_of_one_name_do_not_mix(tmp_path: Path) -> None:
    """Each spider gets its own."""
    for name in ("one", "two"):
        written(tmp_path / name, shop="import models\n" + SHOP + "shop.params['from'] = models.NAME\n", models=f"NAME = {name!r}")
    found = [load(tmp_path / name / "shop.py").spider.params["from"] for name in ("one", "two", "one")]
    assert found == ["one", "two", "one"]


def test_a_module_that_changed_is_loaded_anew(tmp_path: Path) -> None:
    """Also when it changed in the same second, and by as many bytes."""
    text = "import models\n" + SHOP + "shop.params['from'] = models.NAME\n"
    assert load(written(tmp_path, shop=text, models="NAME = 'a'")).spider.params["from"] == "a"
    assert load(written(tmp_path, shop=text, models="NAME = 'b'")).spider.params["from"] == "b"


def test_a_broken_module_that_was_mended_is_loaded_anew(tmp_path: Path) -> None:
    """A first load that failed leaves nothing of it in the way."""
    text = "import models\nimport other\n" + SHOP + "shop.params['from'] = models.NAME\n"
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        load(written(tmp_path, shop=text, models="NAME = 'a'", other="1 / 0"))
    assert load(written(tmp_path, shop=text, models="NAME = 'b'", other="")).spider.params["from"] == "b"


def test_a_module_of_the_folder_that_was_there_before_stays_the_same(tmp_path: Path) -> None:
    """A user's test and the spider see one class."""
    file = written(tmp_path, shop="import models\n" + SHOP + "shop.params['id'] = str(id(models))\n", models="")
    sys.path.insert(0, str(tmp_path))
    import models  # type: ignore[import-not-found]

    assert load(file).spider.params["id"] == load(file).spider.params["id"] == str(id(models))


DIGESTED = [
    ({"shop": SHOP + "#"}, True),
    ({"models": "X = 2"}, True),
    ({"deep/er": "Y = 2"}, True),
    ({"deep/__init__": "Y = 2"}, True),
    ({"unused": "Z = 2"}, False),
]


@pytest.mark.parametrize(("change", "is_other"), DIGESTED)
def test_the_digest_covers_what_is_imported_from_the_folder(tmp_path: Path, change: dict[str, str], is_other: bool) -> None:
    """At whatever distance, in packages too; and nothing else."""
    files = {
        "shop": "import models\n" + SHOP,
        "models": "from deep.er import Y",
        "deep/__init__": "from . import also",
        "deep/also": "",
        "deep/er": "Y = 1",
        "unused": "Z = 1",
    }
    before = code_digest(written(tmp_path / "a", **files))
    assert code_digest(written(tmp_path / "b", **files)) == before
    assert (code_digest(written(tmp_path / "c", **{**files, **change})) != before) is is_other
