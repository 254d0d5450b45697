"""From documents to rows: a folder of .txt and .pdf files, and a CSV with the fields of each file.

    receipts/
        fields.csv      file,company,date,total
        0001.pdf        ...
        0002.txt

The CSV has a column `file` (the name, or the path below the folder) and one column for each key of the schema; an empty
cell says that the document does not show the value. Amounts and dates may be written in any form with one reading;
lists and objects are JSON in a cell. Every file needs one row, and every row a file. The text of a PDF is its text
layer, read by pypdf; pages are joined, and each one after the first is marked.
"""

import csv
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate import PartialState

from field_values import amount_readings, date_readings
from invoice import kind, load_schema, target_text

DOCUMENT_KINDS = (".txt", ".pdf")
TEXT_COLUMN, TARGET_COLUMN = "text", "fields"


def as_rows(script_args, training_args, recipe_args) -> None:
    """Where `dataset_name` is a folder of documents, write its rows into the output folder and name that file instead.

    The file's name holds a digest of all that decides its content, so a change of a document is a change of the run; its
    underscore keeps it out of what --push_to_hub uploads.
    Raises ValueError, naming file and row.
    """
    folder = Path(script_args.dataset_name)
    documents = find_documents(folder) if folder.is_dir() else []
    if not documents:
        return
    table = find_table(folder)
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in (table, Path(recipe_args.schema_file), *documents):
        digest.update(str(path.name).encode() + hashlib.sha256(path.read_bytes()).digest())
    rows_file = Path(training_args.output_dir, f"_rows-{digest.hexdigest()[:12]}.jsonl")
    state = PartialState()
    if state.is_local_main_process and not rows_file.is_file():
        rows = read_folder(folder, load_schema(recipe_args.schema_file))
        rows_file.parent.mkdir(parents=True, exist_ok=True)
        partial = rows_file.with_name(f"{rows_file.name}.{state.process_index}.partial")  # one a machine
        partial.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        os.replace(partial, rows_file)
        print(f"{folder}: {len(rows)} documents and {table.name} became {rows_file}", flush=True)
    state.wait_for_everyone()
    script_args.dataset_name = str(rows_file)
    recipe_args.text_column, recipe_args.target_column = TEXT_COLUMN, TARGET_COLUMN


def find_documents(folder: Path) -> list[Path]:
    """The .txt and .pdf files in and below `folder`, sorted."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in DOCUMENT_KINDS and path.is_file())


def find_table(folder: Path) -> Path:
    """The one .csv file of the folder. Raises ValueError when there is none or more than one."""
    tables = sorted(folder.glob("*.csv"))
    if len(tables) != 1:
        found = ", ".join(path.name for path in tables) or "none"
        raise ValueError(
            f"{folder} holds documents, so it needs one .csv file with their fields; found: {found}. Give one, with a "
            "column `file` and a column for each key of the schema."
        )
    return tables[0]


def read_folder(folder: Path, schema: dict) -> list[dict]:
    """Rows {"id", "text", "fields"} of a folder of documents and its CSV, in the order of the file names.

    Raises ValueError that names the file, and the CSV's row, for the first thing that is wrong.
    """
    table, documents = find_table(folder), find_documents(folder)
    fields = dict(read_table(table, schema))
    names = {path.relative_to(folder).as_posix(): path for path in documents}
    missing, spare = sorted(fields.keys() - names), sorted(names.keys() - fields)
    if missing or spare:
        parts = [f"{len(missing)} row(s) whose file is not there: {', '.join(missing[:5])}"] * bool(missing)
        parts += [f"{len(spare)} file(s) without a row: {', '.join(spare[:5])}"] * bool(spare)
        raise ValueError(f"{table}: {'; '.join(parts)}. Every file needs one row, and every row a file.")
    return [{"id": name, TEXT_COLUMN: read_text(path), TARGET_COLUMN: fields[name]} for name, path in names.items()]


def read_text(path: Path) -> str:
    """The text of a .txt or .pdf file. Raises ValueError, naming the file, when there is none to read."""
    text = _pdf_text(path) if path.suffix.lower() == ".pdf" else _plain_text(path)
    if not text.strip():
        raise ValueError(f"{path} holds no text.")
    return text


def _plain_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: byte {error.start} (0x{error.object[error.start]:02x}) is not UTF-8. Save the file as UTF-8."
        ) from error


def _pdf_text(path: Path) -> str:
    try:
        import pypdf
    except ImportError as error:
        raise ValueError(
            f"{path}: PDF files need the package pypdf, which is not installed: pip install pypdf."
        ) from error
    try:
        reader = pypdf.PdfReader(path)
        if reader.is_encrypted and not reader.decrypt(""):
            raise ValueError(f"{path} is locked with a password. Save it without one.")
        pages = [(page.extract_text().strip(), bool(page.images.keys())) for page in reader.pages]
    except (pypdf.errors.PyPdfError, OSError, KeyError, TypeError, AttributeError) as error:  # what broken files raise
        raise ValueError(f"{path} cannot be read as a PDF ({type(error).__name__}: {error}). Save it anew.") from error
    scans = [number for number, (text, has_image) in enumerate(pages, 1) if not text and has_image]
    if scans or not any(text for text, _ in pages):
        which = f"page {', '.join(map(str, scans))} of" if scans else "none of its"
        raise ValueError(
            f"{path} has no text layer on {which} {len(pages)} page(s): it is a scan or a drawing. Run OCR first, for "
            f"instance `ocrmypdf {path.name} {path.name}`."
        )
    marked = [
        text if number == 1 else f"[page {number} of {len(pages)}]\n{text}"
        for number, (text, _) in enumerate(pages, 1)
        if text
    ]
    return "\n".join(marked)


# ---- the CSV of fields -----------------------------------------------------------------------------------------------


def read_table(path: Path, schema: dict) -> Iterator[tuple[str, dict]]:
    """(file name, its fields) of each row of the CSV; commas, semicolons or tabs, UTF-8 with or without a mark.

    Raises ValueError that names the CSV, its row (1 is the first below the head), the file and the column.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines(keepends=True)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8. Save the CSV as UTF-8.") from error
    head = lines[0] if lines else ""
    reader = csv.DictReader(lines, delimiter=max(",;\t", key=head.count), restkey="", strict=True)
    columns, wanted = [name.strip() for name in reader.fieldnames or []], ["file", *schema["properties"]]
    if sorted(columns) != sorted(wanted):
        raise ValueError(f"{path} has the columns {', '.join(columns) or 'none'}; wanted: {', '.join(wanted)}.")
    reader.fieldnames, seen = columns, {}
    try:
        for number, row in enumerate(reader, 1):
            where = f"{path}, row {number}"
            if "" in row or None in row.values():
                raise ValueError(f"{where} has not {len(columns)} cells. Put cells that hold the delimiter in quotes.")
            name = row["file"].strip()
            if not name:
                raise ValueError(f"{where} names no file.")
            if name in seen:
                raise ValueError(f"{where}: {name} stands in row {seen[name]}, too. Keep one of the two.")
            seen[name] = number
            fields = {}
            for key, field in schema["properties"].items():
                try:
                    fields[key] = read_cell(row[key].strip(), field)
                except ValueError as error:
                    raise ValueError(f"{where} ({name}), column {key}: {error}.") from error
            try:
                target_text(fields, schema)
            except ValueError as error:
                raise ValueError(f"{where} ({name}): {error}.") from error
            yield name, fields
    except csv.Error as error:
        raise ValueError(f"{path}, line {reader.line_num}: {error}.") from error
    if not seen:
        raise ValueError(f"{path} has no rows.")


def read_cell(text: str, field: dict) -> Any:
    """A CSV cell as a value of the schema's field; None for an empty one. Raises ValueError with what is wrong."""
    name = kind(field)
    if not text:
        return None
    if name in ("object", "array"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ValueError(f"expected JSON ({error}), found {text:.60}") from error
    if name == "boolean":
        if text.lower() not in ("true", "false"):
            raise ValueError(f"expected true or false, found {text!r}")
        return text.lower() == "true"
    if name in ("number", "integer"):
        amounts = set(amount_readings(text).values())
        if len(amounts) != 1:
            what = " or ".join(sorted(map(str, amounts))) or "no amount"
            raise ValueError(f"{text!r} can be read as {what}; write digits and a decimal point")
        amount = amounts.pop()
        return int(amount) if name == "integer" and amount == int(amount) else float(amount)
    if field.get("format") == "date":
        days = set(date_readings(text).values())
        if len(days) != 1:
            what = " or ".join(sorted(map(str, days))) or "no day"
            raise ValueError(f"{text!r} can be read as {what}; write YYYY-MM-DD")
        return days.pop().isoformat()
    return text
