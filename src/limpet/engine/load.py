"""From the path of a file to its spider, and the digest of the code that a batch was made by.

The file is run under a name of its own, so a spider called json.py hides nothing. As for
`python FILE`, its folder comes first on the path; modules that it imports from there are loaded
anew once any of the code has changed, or belongs to a spider of another folder, so that what runs
is what the digest says. Whatever keeps a spider from being loaded is a UsageError with file and line.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType

from limpet.batch import digest
from limpet.engine.spider import Spider
from limpet.errors import UsageError

#: Files of one spider: a folder in which an import leads on to this many is no spider's.
FILES_MAX = 1000
#: Of a file that Python itself cannot compile, for its parser's stack.
_TOO_DEEP = "an expression in it is nested too deeply for Python: make it shorter, or read the data from a file of its own"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A spider, the file it came from, and the digest of its code."""

    spider: Spider
    file: Path
    code: bytes


def load(path: str | Path, *, name: str = "") -> Loaded:
    """The spider in a file; `name` chooses one where there are several.

    Raises UsageError where there is no such file, it cannot be run, or holds no spider or several.
    """
    file = _existing(path)
    sources = _sources(file)
    code = _digest_of(sources)
    compiled = _compiled(file, sources[file.name])
    _stand_in(file.parent, sources, code)
    try:
        module = _run(file, compiled, code)
    finally:
        _mark(file.parent, sources, code)
    return Loaded(_only_spider(file, module, name), file, code)


def code_of(spider: Spider) -> bytes:
    """The digest of the code of a spider that was not loaded from a path: of the file of its first handler."""
    for function in spider.functions():
        file = Path(function.__code__.co_filename)
        return code_digest(file) if file.is_file() else digest(function.__code__.co_code)
    return digest()


def code_digest(file: Path) -> bytes:
    """16 bytes over a spider's file and every module of its folder that it imports, at whatever distance."""
    return _digest_of(_sources(file.resolve()))


def _existing(path: str | Path) -> Path:
    file = Path(path).expanduser().resolve()
    if file.is_dir():
        raise UsageError(f"{path} is a folder; expected the file of a spider")
    if not file.is_file():
        raise UsageError(f"{path}: there is no such file")
    return file


def _sources(file: Path) -> dict[str, bytes]:
    """Path below the folder -> text, of the file and what it imports from its folder, found without running it."""
    folder = file.parent
    found: dict[str, bytes] = {}
    waiting = [file]
    while waiting:
        source = waiting.pop()
        name = source.relative_to(folder).as_posix()
        if name in found:
            continue
        if len(found) >= FILES_MAX:
            raise UsageError(f"{file}: imports more than {FILES_MAX} modules of its own folder")
        try:
            found[name] = source.read_bytes()
        except OSError as error:
            raise UsageError(f"{source}: cannot be read: {error.strerror}") from error
        waiting.extend(_siblings(folder, source, found[name]))
    return found


def _siblings(folder: Path, source: Path, text: bytes) -> Iterator[Path]:
    """The files in the folder that one module imports; it may be none of Python's, then there are none."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    except (RecursionError, MemoryError) as error:
        raise UsageError(f"{source}: {_TOO_DEEP}") from error
    package = source.parent.relative_to(folder).parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files_of(folder, tuple(alias.name.split(".")))
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = (*above, *(node.module.split(".") if node.module else ()))
            for alias in node.names:
                yield from _files_of(folder, (*base, alias.name))


def _files_of(folder: Path, dotted: tuple[str, ...]) -> Iterator[Path]:
    """What importing a.b.c reads: a, a.b and a.b.c, as far as they are files here."""
    for end in range(1, len(dotted) + 1):
        stem = folder.joinpath(*dotted[:end])
        for file in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py"):
            if file.is_file():
                yield file


def _digest_of(sources: dict[str, bytes]) -> bytes:
    return digest(*(piece for name, text in sorted(sources.items()) for piece in (name.encode(), text)))


def _compiled(file: Path, text: bytes) -> CodeType:
    try:
        return compile(text, str(file), "exec", dont_inherit=True)
    except SyntaxError as error:
        shown = f": {error.text.strip()}" if error.text else ""
        raise UsageError(f"{file}:{error.lineno or 1}: {error.msg}{shown}") from error
    except ValueError as error:
        raise UsageError(f"{file}: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise UsageError(f"{file}: {_TOO_DEEP}") from error


def _stand_in(folder: Path, sources: dict[str, bytes], code: bytes) -> None:
    """Put the folder first on the path, and forget modules of its names that came from other code."""
    sys.path[:] = [str(folder), *(entry for entry in sys.path if entry != str(folder))]
    importlib.invalidate_caches()
    for name in _module_names(sources):
        mark = getattr(sys.modules.get(name), "__limpet_code__", None)
        if mark is not None and mark != _mark_of(folder, code):
            del sys.modules[name]


def _mark(folder: Path, sources: dict[str, bytes], code: bytes) -> None:
    """Note on each module of the folder which code it belongs to, for the next `_stand_in`."""
    for name in _module_names(sources):
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is not None and file and Path(file).is_relative_to(folder):
            module.__dict__["__limpet_code__"] = _mark_of(folder, code)


def _mark_of(folder: Path, code: bytes) -> str:
    return f"{code.hex()} {folder}"


def _module_names(sources: dict[str, bytes]) -> list[str]:
    return [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in sources]


def _run(file: Path, compiled: CodeType, code: bytes) -> ModuleType:
    """Run the file as a module of its own name. It is in sys.modules, where annotations are looked up."""
    name = f"_limpet_{re.sub(r'[^0-9A-Za-z]', '_', file.stem)}_{digest(str(file).encode(), code).hex()[:12]}"
    if getattr(sys.modules.get(name), "__limpet_loading__", False):
        raise UsageError(f"{file}: runs itself while it is loaded; put main() below: if __name__ == '__main__'")
    spec = spec_from_loader(name, SourceFileLoader(name, str(file)))
    assert spec is not None  # a loader was given
    module = module_from_spec(spec)
    module.__dict__["__limpet_loading__"] = True
    before = sys.modules.get(name)
    sys.modules[name] = module
    writes_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # a .pyc can outlive an edit of the same second
    try:
        exec(compiled, module.__dict__)
    except BaseException as error:  # also a class of the file's own, or GeneratorExit
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UsageError(f"{file}:{_line_in(file, error.__traceback__)}: {_told(error)}") from error
    finally:
        sys.dont_write_bytecode = writes_bytecode
    del module.__dict__["__limpet_loading__"]
    return module


def _told(error: BaseException) -> str:
    if isinstance(error, UsageError):
        return str(error)
    if isinstance(error, SystemExit):
        return "ends the process while it is loaded; put main() below: if __name__ == '__main__'"
    return f"{type(error).__name__}: {error}"


def _line_in(file: Path, trace: TracebackType | None) -> int:
    """The last line of the file itself on the way to an error."""
    line = 1
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(file):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def _only_spider(file: Path, module: ModuleType, name: str) -> Spider:
    spiders = list({id(value): value for value in vars(module).values() if isinstance(value, Spider)}.values())
    names = ", ".join(spider.name for spider in spiders)
    if name:
        spiders = [spider for spider in spiders if spider.name == name]
    if not spiders:
        raise UsageError(f"{file}: holds no " + (f"spider {name!r}; it has {names}" if name and names else "Spider(...)"))
    if len(spiders) > 1:
        raise UsageError(f"{file}: holds several spiders ({names}): name one with --spider, or give each a file of its own")
    if not spiders[0].handler_names():
        raise UsageError(f"{file}: spider {spiders[0].name} has no handler; write one below @{spiders[0].name}.page()")
    return spiders[0]
