"""docs/schedules.md is true: what it shows for other programs is well formed, and the commands in it are commands of ours."""

from __future__ import annotations

import ast
import configparser
import re
import shlex
from pathlib import Path

import pytest
import yaml

from limpet.cli.arguments import parser
from limpet.engine.load import load
from limpet.schedule import Schedule
from tests.test_docs import Block, blocks, text_of

PAGE = "docs/schedules.md"


def taken(command: str) -> None:
    """A command line of ours parses; what other programs put in place of {{ ... }} and $NAME is a word."""
    words = shlex.split(re.sub(r"\{\{.*?\}\}|\$\w+", "word", command))
    at = next(number for number, word in enumerate(words) if word == "limpet" or word.endswith("/limpet"))
    end = next((number for number, word in enumerate(words) if word in (">", ">>", "&&") and number > at), len(words))
    assert parser().parse_args(words[at + 1 : end]).command


def test_the_spider_of_the_page_has_the_schedule_that_it_speaks_of(tmp_path: Path) -> None:
    """The first block is a whole file."""
    assert len(blocks(PAGE, "py")) == 3
    file = tmp_path / "prices.py"
    file.write_text(blocks(PAGE, "python")[0].text, encoding="utf-8")
    assert load(file).spider.schedule == Schedule.of("day", at="00:30", tz="Asia/Shanghai")


@pytest.mark.parametrize("block", blocks(PAGE, "py"), ids=lambda block: f"line-{block.line}")
def test_python_for_other_schedulers_compiles_and_calls_commands_of_ours(block: Block) -> None:
    """Airflow and Dagster are not installed here: the text compiles, and the command in it is taken."""
    tree = ast.parse(block.text)
    compile(block.text, PAGE, "exec")
    shell = [
        node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str) and "limpet " in node.value
    ]
    lists = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.List) and "/limpet'" in ast.unparse(node)]
    assert shell or lists
    for command in shell:
        taken(command)
    for listed in lists:
        taken(" ".join(re.findall(r"'([^']+)'|\b(slot)\b", listed)[number][0] or "word" for number in range(listed.count(",") + 1)))


@pytest.mark.parametrize("block", blocks(PAGE, "ini"), ids=lambda block: f"line-{block.line}")
def test_units_of_systemd_are_well_formed(block: Block) -> None:
    """Sections and keys; a service calls a command of ours, and takes 4 for no failure."""
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(block.text)
    kind = re.findall(r"^# /etc/systemd/system/[\w-]+\.(\w+)$", block.text, re.MULTILINE)
    assert kind == ["timer"] if unit.has_section("Timer") else kind == ["service"]
    if kind == ["service"]:
        taken(unit["Service"]["ExecStart"])
        assert unit["Service"]["SuccessExitStatus"] == "4"


def test_the_line_for_cron_and_the_job_of_kubernetes_are_well_formed() -> None:
    """Five fields and a command; a document with a command in it."""
    (crontab,) = blocks(PAGE, "crontab")
    *fields, command = crontab.text.split(None, 5)
    assert Schedule.of(cron=" ".join(fields)).period == "cron"
    taken(command)
    (job,) = blocks(PAGE, "yaml")
    said = yaml.safe_load(job.text)
    (container,) = said["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert Schedule.of(cron=said["spec"]["schedule"]).period == "cron"
    taken(shlex.join(container["args"]))


def test_the_table_of_periods_is_as_the_code_has_it() -> None:
    """Each call makes a schedule whose slots look as the table says."""
    found = re.findall(r"^\| `every\((.*?)\)` \| `(.*?)` \|", text_of(PAGE), re.MULTILINE)
    assert len(found) == 5
    for said, slot in found:
        call = ast.parse(f"f({said})", mode="eval").body
        assert isinstance(call, ast.Call)
        given = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        assert Schedule.of(*map(ast.literal_eval, call.args), **given).has(slot)
