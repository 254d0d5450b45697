"""The numbers of the documentation are those of the measured files: each table is what its program writes from them."""

import re
from pathlib import Path

import pytest
import result_tables
import status_table

ROOT = Path(__file__).resolve().parents[1]
OTHERS = ("engines.md", "scaling.md")  # have programs and tests of their own
PAGES = [ROOT / "README.md", *(page for page in (ROOT / "docs").glob("*.md") if page.name not in OTHERS)]
PAGES += (ROOT / "recipes").glob("*/README.md")


def marks(page: Path) -> list[str]:
    return re.findall(r"^<!-- ([\w-]+) table -->$", page.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(
    "page", [page for page in sorted(PAGES) if marks(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_tables_of_a_page_are_written_by_their_program(page):
    assert page.read_text(encoding="utf-8") == result_tables.filled(page), (
        "Write them anew: python scripts/result_tables.py README.md docs/*.md recipes/*/README.md"
    )


def test_every_table_stands_on_one_page():
    found = [name for page in PAGES for name in marks(page) if name not in result_tables.RECIPE_TABLES]
    assert sorted(found) == sorted(result_tables.TABLES)


def test_status_is_never_better_than_what_was_measured(monkeypatch):
    """A pair that no measured file names is `never` or refused; every pair that is in a file is told."""
    lines = [line.split("|")[1:-1] for line in status_table.status_table().split("\n\n")[0].splitlines()]
    strategies = [name.strip() for name in lines[0][1:]]
    told = {
        (*row[0].replace("`", "").split(), strategy): cell.strip()
        for row in lines[2:]
        for strategy, cell in zip(strategies, row[1:], strict=True)
    }
    measured = {
        (recipe, *([] if config == "config" else [config]), strategy)
        for recipe, config, strategy in status_table.runs()
    }
    assert measured == {key for key, cell in told.items() if cell not in ("", "never")}
    monkeypatch.setattr(status_table, "runs", dict)
    lines = status_table.status_table().split("\n\n")[0].splitlines()[2:]
    cells = [cell.strip() for line in lines for cell in line.split("|")[2:-1]]
    assert set(cells) == {"", "never"} and cells.count("never") >= len(measured)


def test_a_page_with_an_open_or_unknown_mark_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- gpu table -->\nold\n")
    with pytest.raises(ValueError, match="no <!-- end of NAME table -->"):
        result_tables.filled(page)
    page.write_text("<!-- gpus table -->\n<!-- end of gpus table -->\n")
    with pytest.raises(ValueError, match="there is no table gpus"):
        result_tables.filled(page)
