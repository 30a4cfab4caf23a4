"""README.md, RESULTS.md the plot and the report say what the committed results say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import readme  # noqa: E402
from benchmarks.lib.errors import BenchError  # noqa: E402


@pytest.mark.parametrize(
    "path", [*readme.FILES, readme.PLOT, readme.REPORT], ids=lambda path: path.name
)
def test_it_is_what_the_results_say(path: Path) -> None:
    assert path.read_text() == readme.wanted()[path], "python -m benchmarks.readme writes it"


def test_every_part_is_in_a_file() -> None:
    texts = "".join(path.read_text() for path in readme.FILES)
    assert not [name for name in readme.BLOCKS if f"<!-- generated: {name} -->" not in texts]
    assert texts.count("<!-- generated:") == texts.count("<!-- end -->")


def test_the_headline_has_both_targets() -> None:
    (line,) = (line for line in readme.headline().splitlines() if "specx:auto" in line)
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    assert len(cells) == 4 and "-" not in cells


def test_a_number_that_drifted_is_put_right() -> None:
    text = readme.FILES[0].read_text()
    auto = readme.value(readme.find("methods", 1, "auto"), "ratio", 2, "x")
    assert auto in text
    assert readme.filled(text.replace(auto, "9.99x")) == text


def test_a_part_that_nobody_makes_is_named() -> None:
    with pytest.raises(BenchError, match="'nothing'"):
        readme.filled("<!-- generated: nothing -->\n<!-- end -->")
