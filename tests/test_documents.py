"""A folder of PDFs and a CSV become rows: nothing is guessed, nothing is lost, and every mistake is named."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fpdf import FPDF

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "qwen3-8b-invoice"
sys.path.insert(0, str(RECIPE))

from sample_receipts import make_rows  # noqa: E402

from documents import read_cell, read_folder, read_text  # noqa: E402
from invoice import load_schema  # noqa: E402

SAMPLE = load_schema(RECIPE / "schema_sample.json")
HEAD = "file,doc_type,invoice_no,date,seller,total\n"


def pdf(path, *pages, image=None, password=None):
    """A PDF with one page for each text; None is a page with nothing but, perhaps, a picture."""
    made = FPDF()
    made.set_font("Helvetica", size=12)
    for text in pages:
        made.add_page()
        if text is not None:
            made.multi_cell(0, 8, text)
        elif image:
            made.image(image, w=20)
    if password:
        made.set_encryption(owner_password=password, user_password=password)
    made.output(str(path))
    return path


@pytest.fixture
def picture(tmp_path):
    from PIL import Image

    Image.new("RGB", (8, 8), "white").save(tmp_path / "scan.png")
    return tmp_path / "scan.png"


def folder(tmp_path, table, **files):
    made = tmp_path / "receipts"
    made.mkdir()
    (made / "fields.csv").write_bytes(table if isinstance(table, bytes) else table.encode())
    for name, text in files.items():
        (made / f"{name}.txt").write_text(text, encoding="utf-8")
    return made


def test_sample_pdfs_give_back_the_very_rows_that_they_were_made_of(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "scripts" / "sample_pdfs.py"),
        str(tmp_path),
        "--labelled",
        "20",
        "--new",
        "2",
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    wanted = make_rows(SAMPLE, {"labelled": 20, "new": 2}, seed=0)["labelled"]
    found = read_folder(tmp_path / "labelled", SAMPLE)
    assert [(row["text"], row["fields"]) for row in found] == [(row["text"], row["entities"]) for row in wanted]
    assert any("€" in row["text"] for row in found)
    assert len(list((tmp_path / "new").glob("*.pdf"))) == 2


def test_pages_are_joined_and_marked(tmp_path):
    assert read_text(pdf(tmp_path / "two.pdf", "First\nline", "Second")) == "First\nline\n[page 2 of 2]\nSecond"
    assert read_text(pdf(tmp_path / "back.pdf", "First", None)) == "First"  # an empty back page is no scan


def test_a_scan_is_refused_with_the_way_to_ocr(tmp_path, picture):
    for name, pages, where in (("scan", [None], "page 1 of"), ("mixed", ["Text", None], "page 2 of")):
        path = pdf(tmp_path / f"{name}.pdf", *pages, image=picture)
        with pytest.raises(ValueError, match=rf"{name}\.pdf has no text layer on {where}.*ocrmypdf {name}\.pdf"):
            read_text(path)
    with pytest.raises(ValueError, match=r"empty\.pdf has no text layer on none of"):
        read_text(pdf(tmp_path / "empty.pdf", None))


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.7 and nothing else")
    (tmp_path / "latin.txt").write_bytes("Zürich".encode("latin-1"))
    (tmp_path / "blank.txt").write_text(" \n")
    for name, reason in (("broken.pdf", "cannot be read as a PDF"), ("latin.txt", "0xfc"), ("blank.txt", "no text")):
        with pytest.raises(ValueError, match=rf"{name}.*{reason}"):
            read_text(tmp_path / name)
    locked = pdf(tmp_path / "locked.pdf", "Secret", password="key")
    with pytest.raises(ValueError, match=r"locked\.pdf"):
        read_text(locked)


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("1.234,50", {"type": "number"}, 1234.5),
        ("1,234.50", {"type": "number"}, 1234.5),
        ("-3", {"type": "integer"}, -3),
        ("25 Dec 2018", {"type": "string", "format": "date"}, "2018-12-25"),
        ("2018-12-25", {"type": "string", "format": "date"}, "2018-12-25"),
        ("00123", {"type": "string"}, "00123"),
        ("TRUE", {"type": "boolean"}, True),
        ('[{"name": "Tea"}]', {"type": "array"}, [{"name": "Tea"}]),
        ("", {"type": "number"}, None),
    ],
)
def test_cells_are_read_by_the_type_of_the_field(text, field, value):
    assert read_cell(text, field) == value and type(read_cell(text, field)) is type(value)


@pytest.mark.parametrize(
    ("text", "field", "reason"),
    [
        ("1,234", {"type": "number"}, r"can be read as 1\.234 or 1234"),
        ("ten", {"type": "number"}, "can be read as no amount"),
        ("03/04/2018", {"type": "string", "format": "date"}, "2018-03-04 or 2018-04-03; write YYYY-MM-DD"),
        ("yes", {"type": "boolean"}, "expected true or false"),
        ("Tea", {"type": "array"}, "expected JSON"),
    ],
)
def test_a_cell_with_two_readings_or_none_is_not_guessed(text, field, reason):
    with pytest.raises(ValueError, match=reason):
        read_cell(text, field)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_tables_of_spreadsheet_programs_are_read(tmp_path, delimiter):
    table = HEAD + 'a.txt,receipt,A1,2024-02-29,"Müller & Söhne, Bonn",9.00\n'
    if delimiter != ",":
        table = (
            table.replace('"Müller & Söhne, Bonn"', "Müller & Söhne~ Bonn").replace(",", delimiter).replace("~", ",")
        )
    made = folder(tmp_path, b"\xef\xbb\xbf" + table.replace("\n", "\r\n").encode(), a="Rechnung")
    (row,) = read_folder(made, SAMPLE)
    assert row["id"] == "a.txt" and row["text"] == "Rechnung"
    assert row["fields"] == {
        "doc_type": "receipt",
        "invoice_no": "A1",
        "date": "2024-02-29",
        "seller": "Müller & Söhne, Bonn",
        "total": 9.0,
    }


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (HEAD + "b.txt,,,,,\n", r"1 row\(s\) whose file is not there: b\.txt; 1 file\(s\) without a row: a\.txt"),
        (HEAD + "a.txt,,,,,\na.txt,,,,,\n", r"row 2: a\.txt stands in row 1, too"),
        (HEAD + "a.txt,,,,,\n,,,,,\n", "row 2 names no file"),
        (HEAD + "a.txt,bill,,,,\n", r"row 1 \(a\.txt\): the target breaks the schema: doc_type: 'bill'"),
        (HEAD + 'a.txt,,,,,"1,234"\n', r"row 1 \(a\.txt\), column total: '1,234' can be read as"),
        (HEAD + "a.txt,,,,,1,2\n", "row 1 has not 6 cells"),
        ("file,doc_type\na.txt,\n", "has the columns file, doc_type; wanted: file, doc_type, invoice_no"),
        (HEAD, "has no rows"),
        (HEAD.encode() + b"a.txt,,,,\xfc,\n", "byte .* is not UTF-8"),
    ],
)
def test_a_mistake_in_the_table_is_named_with_row_and_file(tmp_path, table, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        read_folder(folder(tmp_path, table, a="Receipt"), SAMPLE)
    assert "fields.csv" in str(caught.value)


def test_two_tables_are_one_too_many(tmp_path):
    made = folder(tmp_path, HEAD, a="Receipt")
    (made / "old.csv").write_text(HEAD)
    with pytest.raises(ValueError, match=r"needs one \.csv file with their fields; found: fields\.csv, old\.csv"):
        read_folder(made, SAMPLE)


def test_the_run_reads_one_file_of_rows_that_changes_with_the_documents(tmp_path, monkeypatch):
    import documents

    made = folder(tmp_path, HEAD + "a.txt,receipt,,,,9.00\n", a="Receipt 9.00")

    def rows_file():
        script = SimpleNamespace(dataset_name=str(made))
        recipe = SimpleNamespace(schema_file=str(RECIPE / "schema_sample.json"), text_column=None, target_column=None)
        documents.as_rows(script, SimpleNamespace(output_dir=str(tmp_path / "run")), recipe)
        assert (recipe.text_column, recipe.target_column) == ("text", "fields")
        return Path(script.dataset_name)

    first = rows_file()
    (row,) = [json.loads(line) for line in first.read_text(encoding="utf-8").splitlines()]
    assert row["text"] == "Receipt 9.00" and row["fields"]["total"] == 9.0
    monkeypatch.setattr(documents, "read_folder", lambda *_: pytest.fail("read again, though nothing changed"))
    assert rows_file() == first
    monkeypatch.undo()
    (made / "a.txt").write_text("Receipt 9.00!")
    second = rows_file()
    assert second != first and first.is_file()  # the run of the old documents keeps its rows

    plain = SimpleNamespace(dataset_name="owner/name")  # a Hub dataset or a file of rows passes untouched
    documents.as_rows(plain, None, None)
    assert plain.dataset_name == "owner/name"
