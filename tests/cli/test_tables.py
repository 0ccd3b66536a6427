"""Tables at 80 columns, as Markdown and as CSV."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from tersekv import cli
from tersekv.cli import output
from tersekv.cli.bare import Cell, bare, size
from tersekv.policies.mixed import RECOMMENDED

LONG = RECOMMENDED.format("1.7")
NUMBERS = [["25.12 MB", "1,048,576", "0.1732 ± 0.0246", "4.26", "96.9%"], ["12.01 GB", "8", "–", "16.00", "100.0%"]]
HEADINGS = ("bytes", "tokens", "KL divergence", "bits", "same next token")


def drawn(table: output.Tables, width: int = 80, colours: bool = False) -> str:
    screen = io.StringIO()
    Console(file=screen, width=width, force_terminal=colours, color_system="standard" if colours else None).print(table)
    return screen.getvalue()


def cells(text: str) -> list[str]:
    return [cell.strip() for line in text.splitlines() for cell in re.split("[│┃]", line)]


def test_long_recipes_lose_no_number() -> None:
    """As names of rows they wrap after punctuation, and as headings, too."""
    rows = [[LONG, *NUMBERS[0]], ["full", *NUMBERS[1]]]
    for table, numbers in (
        (output.table("t", ("recipe", *HEADINGS), rows), NUMBERS[0] + NUMBERS[1]),
        (output.table("t", ("", "full", LONG), [("bytes", "1.00 GB", "12.5 MB")]), ["1.00 GB", "12.5 MB"]),
    ):
        said = drawn(table)
        assert max(map(len, said.splitlines())) <= 80
        assert set(numbers) <= set(cells(said))
        joined = "".join(cell for cell in cells(said) if len(cell) > 20 and cell in LONG)
        assert LONG in joined, said


def test_many_columns_of_text_are_split_and_not_cut() -> None:
    row = ("gguf-1d9614638d18024d", "SmolLM2-135M-Instruct (Llama architecture)", "ready", "/home/someone/.cache/x/y/z")
    table = output.table("models", ("name", "model", "state", "where", "size"), [(*row, "270.91 MB")], left=4)
    said = drawn(table, 60)
    assert max(map(len, said.splitlines())) <= 60
    assert "270.91 MB" in cells(said)
    assert "/home/someone/.cache/x/y/z" in "".join(cells(said))


def test_a_ruined_row_is_red_in_a_terminal() -> None:
    table = output.table(
        "t", ("recipe", "KL", "in words"), [("a", "1.4", "RUINED: choose another recipe")], words=("in words",)
    )
    assert "\x1b[1;31mRUINED" in drawn(table, 100, colours=True)
    assert "\x1b" not in drawn(table, 100)


def test_markdown_and_csv_hold_the_same_cells(capsys: pytest.CaptureFixture[str]) -> None:
    table = output.table(
        "title", ("recipe", *HEADINGS), [[LONG, *NUMBERS[0]], ["a\nb|c", *NUMBERS[1]]], notes=["a note"]
    )
    output.use_form("csv")
    try:
        output.show("a sentence")
        output.show(table)
        out, err = capsys.readouterr()
        assert list(csv.reader(out.splitlines()))[:3] == [
            ["recipe", *HEADINGS[:-1], "same next token (%)"],
            [LONG, "25.12 MB", "1048576", "0.1732 ± 0.0246", "4.26", "96.9"],
            ["a b|c", "12.01 GB", "8", "", "16.0", "100.0"],
        ]
        assert err == "a sentence\n"
        output.use_form("md")
        output.show("a sentence")
        output.show(table)
        lines = capsys.readouterr().out.splitlines()
    finally:
        output.use_form("text")
    assert lines[0] == "a sentence"
    assert lines[2] == "**title**"
    assert lines[6].split(" | ")[1:] == [*NUMBERS[0][:-1], f"{NUMBERS[0][-1]} |"]
    assert "a b\\|c" in lines[7]
    assert "a note" in lines


def test_bare_numbers_have_their_unit_in_the_name_of_the_column() -> None:
    """Ranges and other cells of several numbers get several columns."""
    rows = [("a", size(1_500), Cell("3 ± 1", {"{}": 3, "{}, standard error": 1}), "1.5–2"), ("b", "-", "unknown", "7")]
    columns, bared = bare(output.table("t", ("recipe", "size\nof it", "4,096", "s"), rows))
    assert columns == ["recipe", "size of it (bytes)", "4096", "4096, standard error", "s, from", "s, to", "s"]
    assert bared == [["a", 1500, 3, 1, 1.5, 2, None], ["b", None, None, None, None, None, 7]]
    turned = output.table(
        "t", ("", "x", "y"), [("held", size(5), size(6)), ("id", "12", "3e4")], by_column="c", words=("id",)
    )
    assert bare(turned) == (["c", "held (bytes)", "id"], [["x", 5, "12"], ["y", 6, "3e4"]])


@pytest.mark.parametrize(
    "call",
    [
        ("estimate", "-r", "default", "-r", "kivi:bits=4", "--memory", "2GB"),
        ("estimate", "--memory", "2GB"),
        ("estimate", "--tables", "kvquant"),
        ("list",),
        ("models", "list"),
        ("eval", "perplexity", "--text", "{text}", "--context", "64", "--windows", "2", "-r", "kivi:bits=4"),
        ("prompt-cache", "build", "-p", "hello " * 50, "-o", "{folder}/c"),
        ("bench", "generate", "--context", "64", "--rounds", "1", "--new-tokens", "4"),
    ],
    ids=lambda call: " ".join(call[:2]),
)
def test_no_cell_of_csv_holds_a_unit(
    call: tuple[str, ...], tiny: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("Keys and values. " * 40)
    known = call[0] in ("list", "models") or "--tables" in call
    given = [part.format(text=tmp_path / "text", folder=tmp_path) for part in call]
    assert cli.run([*given, *(() if known else ("-m", tiny)), "--format", "csv"]) == 0
    for row in csv.reader(capfd.readouterr().out.splitlines()):
        for cell in row:
            assert not re.fullmatch(r"[\d.,]+ ?([kMGT]?B|%|×|s|ms|µs)|\d\S* [±(]\s?\d.*", cell), row
