"""Write made-up receipts as PDF files with a text layer, and a CSV with their fields: something to try the recipe on.

    python scripts/sample_pdfs.py OUT_DIR --labelled 50 --new 10 --seed 0

OUT_DIR/labelled/ holds PDF files and fields.csv, as the invoice recipe reads them; OUT_DIR/new/ holds PDF files without
fields, and OUT_DIR/new.csv is the gold of those. The documents are those of sample_receipts.py. Needs the package fpdf2.
"""

import argparse
import csv
import json
import sys
from pathlib import Path

from sample_receipts import RECIPE, make_rows

from invoice import load_schema  # sample_receipts puts the recipe on the path


def write_pdf(text: str, path: Path) -> None:
    """One page, or as many as the lines need, in Helvetica (Latin letters and the euro sign)."""
    from fpdf import FPDF

    pdf = FPDF()
    pdf.core_fonts_encoding = "windows-1252"
    pdf.add_page()
    pdf.set_font("Helvetica", size=12)
    for line in text.split("\n"):
        pdf.cell(0, 8, line, new_x="LMARGIN", new_y="NEXT")
    pdf.output(str(path))


def write_table(rows: list[dict], path: Path, keys: list[str]) -> None:
    """The CSV of fields; an empty cell is an absent value."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["file", *keys])
        for row in rows:
            cells = [row["entities"][key] for key in keys]
            cells = ["" if x is None else x if isinstance(x, str) else json.dumps(x) for x in cells]
            writer.writerow([f"{row['id']}.pdf", *cells])


def main() -> int | str:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    for name, default in (("--labelled", 50), ("--new", 10), ("--seed", 0)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--schema", type=Path, default=RECIPE / "schema_sample.json")
    arguments = parser.parse_args()
    try:
        schema = load_schema(arguments.schema)
        made = make_rows(schema, {"labelled": arguments.labelled, "new": arguments.new}, arguments.seed)
        for split, rows in made.items():
            folder = arguments.out_dir / split
            folder.mkdir(parents=True, exist_ok=True)
            for row in rows:
                write_pdf(row["text"], folder / f"{row['id']}.pdf")
        keys = list(schema["properties"])
        write_table(made["labelled"], arguments.out_dir / "labelled" / "fields.csv", keys)
        write_table(made["new"], arguments.out_dir / "new.csv", keys)
    except ImportError:
        return "sample_pdfs.py: it needs the package fpdf2: pip install fpdf2"  # sys.exit prints it and exits with 1
    except (ValueError, OSError) as error:
        return f"sample_pdfs.py: {error}"
    print(f"{arguments.out_dir}: {arguments.labelled} PDF files with fields.csv in labelled/, {arguments.new} in new/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
