"""What the documentation points at is there: links, anchors, error texts, the programs' rule names."""

import ast
import functools
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(path for folder in (ROOT, ROOT / "docs", ROOT / ".github") for path in folder.glob("*.md"))
PAGES += sorted((ROOT / "recipes").glob("*/README.md"))
# Packages whose messages docs/troubleshooting.md quotes.
QUOTED = ("torch/distributed", "torch/utils", "transformers", "trl", "accelerate", "peft", "deepspeed")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@functools.cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    made = set()
    for heading in re.findall(r"^#+ +(.*?) *$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        made.add(re.sub(r"[^\w\- ]", "", text).replace(" ", "-"))
    return made


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page))):
        address = urlsplit(target)
        if address.scheme:
            assert address.scheme == "https" and "." in address.netloc, f"{target}: not a well-formed https address"
            continue
        there = (page.parent / address.path).resolve() if address.path else page
        assert there.exists() and there.is_relative_to(ROOT), f"{target} is not there"
        assert not address.fragment or address.fragment in anchors(there), f"{target}: {there.name} has no such heading"


def test_every_page_can_be_reached_from_the_readme():
    reached, left = set(), {ROOT / "README.md"}
    while left:
        page = left.pop()
        reached.add(page)
        targets = (urlsplit(target) for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)))
        pages = {(page.parent / address.path).resolve() for address in targets if not address.scheme and address.path}
        left |= {found for found in pages if found.suffix == ".md" and found.is_file()} - reached
    assert {page for page in PAGES if page.parent.name != ".github"} <= reached


def test_a_picture_shows_what_the_terminal_showed(tmp_path):
    picture = tmp_path / "shown.svg"
    program = "import sys; print('\\033[7mlearned\\033[0m', sys.stdout.isatty()); sys.exit(3)"
    command = [sys.executable, ROOT / "scripts" / "picture.py", picture, sys.executable, "-c", program]
    assert subprocess.run(command).returncode == 3
    text = picture.read_text(encoding="utf-8")
    assert "learned" in text and "True" in text and "Traceback" not in text
    assert "url(" not in re.sub(r"url\(#[^)]*\)", "", text), "a picture loads nothing from elsewhere"


def rows(text: str) -> list[list[str]]:
    """The cells of the rows of a page's tables, without heads and rules."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if "you see |" not in line]


def own_texts() -> str:
    """Every text in the code of recipes and scripts, with a mark where a value is filled in."""
    texts = []
    for path in [*(ROOT / "recipes").glob("*/*.py"), *(ROOT / "scripts").glob("**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_messages_that_troubleshooting_quotes_are_those_of_the_code():
    """Each `quote` in a first column stands in the cookbook's code, or in that of the pinned libraries."""
    table = rows((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    quotes = {quote for row in table for quote in re.findall(r"`([^`]+)`", row[0])}
    own = own_texts()
    foreign = sorted(quote for quote in quotes if quote not in own)
    assert len(quotes) - len(foreign) >= 40
    site = Path(sysconfig.get_path("purelib"))
    folders = [str(site / name) for name in QUOTED]
    patterns = [word for quote in foreign for word in ("-e", quote)]
    found = subprocess.run(
        ["grep", "-rhoF", "--include=*.py", *patterns, *folders], capture_output=True, text=True
    ).stdout.splitlines()
    assert set(foreign) == set(found), f"quoted, but in no code: {sorted(set(foreign) - set(found))}"


def test_rules_that_troubleshooting_names_are_those_of_the_check():
    table = rows((ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    checks, inspections = (
        "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "scripts").glob(pattern))
        for pattern in ("check_*.py", "inspect_*.py")
    )
    for row in table:
        assert len(row) == 4, row
        for who in row[3].split(";"):
            for name in re.findall(r"`([^`]+)`", who):
                if who.strip().startswith("check"):
                    assert f'"{name}"' in checks, f"check.py has no rule {name}"
                elif who.strip().startswith("inspect"):
                    assert f'"{name}"' in inspections, f"inspect_data.py has no check {name!r}"
                else:
                    assert name in own_texts(), name


def test_issue_forms_are_forms_and_ask_for_the_machine():
    """GitHub's required keys; the bug form asks for the output of a command that exists."""
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")}
    for name, form in forms.items():
        if name == "config":
            continue
        assert form["name"] and form["description"]
        for field in form["body"]:
            assert field["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes"), field
            assert field["type"] == "markdown" or (field["id"] and field["attributes"]["label"])
    assert "python scripts/check.py --machine" in str(forms["bug"])


def test_every_pair_that_is_supported_was_run():
    """A new configuration: `python -m pytest --matrix tests/test_strategies.py -k NAME`, then result_tables.py."""
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("<!-- status table -->")[1].split("<!-- end")[0]
    assert table.count("CPU") > 100 and "| never" not in table
