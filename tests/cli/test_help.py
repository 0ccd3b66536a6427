"""Help: examples of every command, shell completion, `tersekv list NAME`, and names of other tools."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

import tersekv
from tersekv import cli
from tersekv.cli import examples, listing
from tersekv.codecs import methods
from tersekv.lab.evals.options import all_options
from tersekv.policies import policies
from tersekv.recipe import PRESETS


def every(command: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from every(below, f"{path} {name}".strip())


def test_every_command_has_examples_that_parse() -> None:
    root = typer.main.get_command(cli.app)
    commands = dict(every(root))
    assert set(commands) == set(examples.EXAMPLES)
    for path, command in commands.items():
        shown = command.epilog.split("\n\n")
        assert shown[0] == "Examples:", path
        for line in shown[1:]:
            assert len(line) <= 78, line
            words = shlex.split(line)[1:]
            one = root
            while hasattr(one, "commands"):
                one = one.commands[words.pop(0)]
            one.make_context("x", words)  # raises for an unknown option or a missing value


def test_commands_with_json_have_formats() -> None:
    for path, command in every(typer.main.get_command(cli.app)):
        if not hasattr(command, "commands"):
            names = {param.name for param in command.get_params(typer.Context(command))}
            assert ("form" in names) is ("as_json" in names), path


def test_json_and_another_format(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["list", "kivi", "--json", "--format", "csv"]) == 2
    assert "--json and --format csv were both given" in capfd.readouterr().err
    assert cli.run(["list", "kivi", "--format", "json"]) == 0
    assert capfd.readouterr().out.startswith('{"name": "kivi"')


def test_a_shell_completes_commands() -> None:
    words = {"_TERSEKV_COMPLETE": "complete_bash", "COMP_WORDS": "tersekv esti", "COMP_CWORD": "1"}
    call = [sys.executable, "-m", "tersekv"]
    found = subprocess.run(call, env=os.environ | words, capture_output=True, text=True)
    assert found.stdout.split() == ["estimate"]


def test_every_option_of_a_task_has_a_sentence() -> None:
    for option, (_, said) in all_options().items():
        assert said.endswith("."), option
        assert len(said.split()) >= 3, option


@pytest.mark.parametrize("name", [*methods(), *policies(), *PRESETS])
def test_a_method_says_what_it_is_good_for_and_what_options_mean(name: str) -> None:
    one = listing.describe_one(name)
    assert one["does"]
    assert "unknown" not in (one["good_for"], one["bad_for"])
    assert set(one["options"]) <= set(one["says"])
    assert one["example"] is None or tersekv.Recipe.parse(one["example"])


def test_an_unknown_method_has_no_page() -> None:
    with pytest.raises(tersekv.UserError, match="did you mean 'kivi'"):
        listing.describe_one("kivu")


@pytest.mark.parametrize(
    ("name", "recipe"),
    [("q8_0", "uniform:bits=8,group=32"), ("q4_0", "uniform:bits=4,group=32"), ("q4_k_m", "uniform:bits=4,group=32"),
     ("int8", "uniform:bits=8,group=64"), ("fp8", "uniform:bits=8,group=0"), ("FP8_E4M3", "uniform:bits=8,group=0"),
     ("nf4", "normalfloat:bits=4"), ("hqq-2", "kivi:bits=2"), ("bf16", "exact"),
     ("iq4_nl", "normalfloat:bits=4,group=32")],
)  # fmt: skip
def test_names_of_other_tools_are_answered_with_a_recipe(name: str, recipe: str) -> None:
    with pytest.raises(tersekv.UserError, match=rf"the nearest recipe is {recipe}, and default"):
        tersekv.Recipe.parse(name)
    assert str(tersekv.Recipe.parse(recipe)) == recipe


def test_mixed_alone_offers_the_recommended_recipe() -> None:
    with pytest.raises(tersekv.UserError, match=r"write small, or another method"):
        tersekv.Recipe.parse("mixed")
    with pytest.raises(tersekv.UserError, match=r"write snapkv\+default"):
        tersekv.Recipe.parse("snapkv")
