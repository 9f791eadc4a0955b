"""The files that deploy workers: they parse, and every command, option and variable in them is one that Limpet has."""

from __future__ import annotations

import configparser
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from limpet.cli.arguments import parser
from limpet.cli.configuration import EXTRAS, PREFIX
from limpet.settings import documented

ROOT = Path(__file__).parent.parent
YAML = ("compose.yaml", "deploy/kubernetes.yaml")
UNIT = "deploy/limpet.service"

#: Variables of others that the files set for libraries and servers.
FOREIGN = re.compile(r"PG[A-Z]+|POSTGRES_\w+|MARIADB_\w+|MYSQL_\w+")


def documents(name: str) -> list[dict[str, Any]]:
    """The documents of a YAML file."""
    return [*yaml.safe_load_all((ROOT / name).read_text(encoding="utf-8"))]


def unit() -> configparser.RawConfigParser:
    """The systemd unit; keys that come twice are read by `environment`."""
    found = configparser.RawConfigParser(strict=False)
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read_string((ROOT / UNIT).read_text(encoding="utf-8"))
    return found


def nodes(value: object) -> Iterator[object]:
    """A value and everything in it."""
    yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from nodes(inner)


def commands(name: str) -> list[list[str]]:
    """Every call of `limpet` in a file, as words after the program's name."""
    if name == UNIT:
        return [shlex.split(unit()["Service"]["ExecStart"])[1:]]
    found: list[list[str]] = []
    for value in (inner for document in documents(name) for inner in nodes(document)):
        if isinstance(value, list) and "limpet" in value[:2] and "-m" not in value:
            words = [str(word) for word in value]
            found.append(words[words.index("limpet") + 1 :])
        elif isinstance(value, str):
            found += [shlex.split(line)[1:] for line in re.findall(r"limpet (?:run|worker|status)[^;\n]*", value) if line]
    return found


def environment(name: str) -> set[str]:
    """Every variable that a file sets."""
    if name == UNIT:
        return set(re.findall(r"^Environment=(\w+)=", (ROOT / UNIT).read_text(encoding="utf-8"), re.MULTILINE))
    found: set[str] = set()
    for value in (inner for document in documents(name) for inner in nodes(document)):
        if isinstance(value, dict):
            found |= set(value.get("environment") or {}) if isinstance(value.get("environment"), dict) else set()
            found |= {entry["name"] for entry in value.get("env") or () if isinstance(entry, dict)}
    return found


@pytest.mark.parametrize("name", [*YAML, UNIT])
def test_every_call_of_limpet_is_one_that_it_understands(name: str) -> None:
    """A renamed flag would break a deployment at its next start, and nowhere before."""
    calls = commands(name)
    assert calls
    for words in calls:
        args = parser().parse_args(words)
        assert args.command in ("run", "worker", "status")


@pytest.mark.parametrize("name", [*YAML, UNIT])
def test_every_variable_is_a_setting_or_one_of_a_library(name: str) -> None:
    """The same of what is set by the environment; and no password is written down."""
    known = {f"{PREFIX}{name.upper()}" for name in (*documented(), *EXTRAS)}
    strange = {variable for variable in environment(name) if variable not in known and not FOREIGN.fullmatch(variable)}
    assert strange == set()
    assert f"{PREFIX}DB" in environment(name)
    assert not re.search(r"://[^/\s]*:[^/@\s]+@", (ROOT / name).read_text(encoding="utf-8"))


def test_compose_has_every_database_and_workers_that_wait_for_them() -> None:
    """PostgreSQL, MariaDB, MySQL 8 and Redis; each port is open to this machine alone."""
    (compose,) = documents("compose.yaml")
    services = compose["services"]
    assert {"postgres", "mariadb", "mysql", "redis", "shop", "crawl", "worker"} == set(services)
    assert services["mysql"]["image"].startswith("mysql:8")
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", ()))


def test_the_deployment_asks_for_life_and_readiness_by_their_own_checks() -> None:
    """Each probe runs the check of its name, and has time for it; a pod has longer to end in than a worker takes."""
    deployment, _ = documents("deploy/kubernetes.yaml")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    for probe, check in (("livenessProbe", "live"), ("readinessProbe", "ready")):
        words = container[probe]["exec"]["command"]
        assert words[words.index("--check") + 1] == check
        assert container[probe]["timeoutSeconds"] >= 5
    assert "--wait" in container["command"]
    assert pod["terminationGracePeriodSeconds"] >= 15
    assert deployment["spec"]["selector"]["matchLabels"].items() <= deployment["spec"]["template"]["metadata"]["labels"].items()


def test_the_unit_passes_one_signal_on_and_starts_again_what_can_go_on() -> None:
    """SIGTERM to the command alone; ends that are none are no failure; a wrong call is not repeated."""
    service = unit()["Service"]
    assert service["KillMode"] == "mixed"
    assert set(service["SuccessExitStatus"].split()) == {"3", "6"}
    assert set(service["RestartPreventExitStatus"].split()) == {"2", "8"}
    assert service["Restart"] == "on-failure"
    assert "PrivateTmp" not in service
