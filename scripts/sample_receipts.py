"""Write made-up receipts, invoices and credit notes with their gold, the same for the same seed and Faker version.

    python scripts/sample_receipts.py OUT_DIR --train 160 --test 16 --seed 0
    python scripts/sample_receipts.py OUT_DIR --schema recipes/qwen3-8b-invoice/schema.json

OUT_DIR/train.jsonl and test.jsonl hold a row {"id", "text", "entities"} a line. The gold has the schema's fields, out
of doc_type, invoice_no, date, seller, client, currency, subtotal, tax, total, items, and is checked against the schema;
the text shows no other names or amounts. Four layouts; three locales with their own words, dates, numbers and currency;
one document in five is a credit note. Every field but doc_type and items is left out of text and gold with probability
0.1 (ABSENT_RATE); the currency is null where no amount shows it. No day can be taken for a month: a date is ISO, or has
a month name, or is German with a day above 12. Train and test share no document and no seller.
"""

import argparse
import json
import random
import sys
from datetime import date
from pathlib import Path

from faker import Faker

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "qwen3-8b-invoice"
sys.path.insert(0, str(RECIPE))
from invoice import canonical, load_schema, target_text  # noqa: E402

ABSENT_RATE = 0.1
LOCALES = {  # currency, how its mark is written, the words of the locale
    "en_US": ("USD", "${}", ["Invoice", "Receipt", "Credit note", "No.", "Date", "Total", "Bill to", "Net", "Tax"]),
    "en_GB": ("GBP", "£{}", ["Invoice", "Receipt", "Credit note", "No.", "Date", "Total", "Sold to", "Net", "VAT"]),
    "de_DE": ("EUR", "{} €", ["Rechnung", "Quittung", "Gutschrift", "Nr.", "Datum", "Summe", "Kunde", "Netto", "MwSt"]),
}
MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
GOODS = ["Tea", "Coffee", "Paper A4", "Lamp", "Ink", "Bread", "Paint", "Cable 2m", "Soap", "Desk", "Mug", "Screws"]
KNOWN = {"doc_type", "invoice_no", "date", "seller", "client", "currency", "subtotal", "tax", "total", "items"}


def written_amount(value: float, locale: str) -> str:
    """An amount with grouping, two decimals and the locale's mark: $1,234.50 or 1.234,50 €."""
    digits = f"{value:,.2f}"
    return LOCALES[locale][1].format(digits.translate(str.maketrans(",.", ".,")) if locale == "de_DE" else digits)


def written_date(day: date, locale: str, draw: random.Random) -> str:
    """Six in ten in ISO form, the rest in the locale's: Mar 14, 2024, or 14 Mar 2024, or 14.03.2024."""
    if draw.random() < 0.6:
        return day.isoformat()
    month = MONTHS[day.month - 1]
    if locale == "de_DE":
        return f"{day.day:02}.{day.month:02}.{day.year}" if day.day > 12 else day.isoformat()
    return f"{month} {day.day}, {day.year}" if locale == "en_US" else f"{day.day} {month} {day.year}"


def make_document(fields: set[str], fakes: dict[str, Faker], draw: random.Random) -> tuple[str, dict]:
    """(text, values) of one document that shows `fields` and nothing else that could be taken for them."""
    locale = draw.choice(list(LOCALES))
    fake = fakes[locale]
    currency, _, words = LOCALES[locale]
    doc_type = draw.choices(["invoice", "receipt", "credit_note"], weights=[2, 2, 1])[0]
    names = draw.sample(GOODS, draw.randint(1, 3))
    lines = [{"name": x, "quantity": float(draw.randint(1, 5)), "price": draw.randint(100, 9999) / 100} for x in names]
    subtotal = round(sum(item["quantity"] * item["price"] for item in lines), 2)
    values = {
        "doc_type": doc_type,
        "invoice_no": draw.choice(["{}", "INV-{}", "R{}", "{}/A"]).format(draw.randint(1000, 9999)),
        "date": fake.date_between(date(2018, 1, 1), date(2025, 12, 31)),
        # Short names keep a row of the default schema, prompt and answer, within some 220 tokens.
        "seller": next(name for name in iter(fake.company, None) if len(name) <= 16),
        "client": fake.name(),
        "subtotal": subtotal,
        "tax": round(subtotal * 0.2, 2),
        "total": round(subtotal + round(subtotal * 0.2, 2), 2),
    }
    kept = {key for key in values if key == "doc_type" or draw.random() >= ABSENT_RATE}
    values = {key: value for key, value in values.items() if key in kept & fields}
    if "items" in fields:
        values["items"] = lines
    amounts = {key: written_amount(values[key], locale) for key in ("subtotal", "tax", "total") if key in values}
    if amounts and "currency" in fields:
        values["currency"] = currency
    title = words[["invoice", "receipt", "credit_note"].index(doc_type)]
    number = f"{words[3]} {values['invoice_no']}" if "invoice_no" in values else ""
    day = f"{words[4]}: {written_date(values['date'], locale, draw)}" if "date" in values else ""
    client = f"{words[6]}: {values['client']}" if "client" in values else ""
    seller = values.get("seller", "")
    rows = [f"{item['quantity']:.0f} x {item['name']} @ {written_amount(item['price'], locale)}" for item in lines]
    sums = [f"{words[7 + i]}: {amounts[key]}" for i, key in enumerate(("subtotal", "tax")) if key in amounts]
    total = f"{words[5]}: {amounts['total']}" if "total" in amounts else ""
    body = [client, *(rows if "items" in fields else []), *sums]
    layouts = [
        [seller, f"{title} {number}", day, *body, total],
        [title, seller, number, day, *body, total],
        [f"{title.upper()} | {day}" if day else title.upper(), number, *body, total, seller],
        [seller, f"{number} {day}", title, *body, total],
    ]
    text = "\n".join(line.strip() for line in draw.choice(layouts) if line.strip())
    if "date" in values:
        values["date"] = values["date"].isoformat()
    return text, values


def make_rows(schema: dict, sizes: dict[str, int], seed: int) -> dict[str, list[dict]]:
    """Rows by split. No text and no seller stands in two splits. Raises ValueError for a field that is not known."""
    unknown = schema["properties"].keys() - KNOWN
    if unknown:
        raise ValueError(
            f"the schema has {', '.join(sorted(unknown))}; this program can make {', '.join(sorted(KNOWN))}"
        )
    draw, fakes = random.Random(seed), {locale: Faker(locale) for locale in LOCALES}
    for number, fake in enumerate(fakes.values()):
        fake.seed_instance(seed * len(LOCALES) + number)
    texts, owner, rows = set(), {}, {split: [] for split in sizes}
    for split, size in sizes.items():
        while len(rows[split]) < size:
            text, values = make_document(set(schema["properties"]), fakes, draw)
            if text in texts or owner.setdefault(values.get("seller", text), split) != split:
                continue
            texts.add(text)
            target_text(values, schema)  # raises when the gold breaks the schema
            row = {"id": f"{split}-{len(rows[split]):05}", "text": text, "entities": canonical(values, schema)}
            rows[split].append(row)
    return rows


def main() -> int | str:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    for name, default in (("--train", 160), ("--test", 16), ("--seed", 0)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--schema", type=Path, default=RECIPE / "schema_sample.json")
    arguments = parser.parse_args()
    try:
        schema = load_schema(arguments.schema)
        rows = make_rows(schema, {"train": arguments.train, "test": arguments.test}, arguments.seed)
        arguments.out_dir.mkdir(parents=True, exist_ok=True)
        for split, made in rows.items():
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made)
            (arguments.out_dir / f"{split}.jsonl").write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        return f"sample_receipts.py: {error}"  # sys.exit prints it and exits with 1
    for split, made in rows.items():
        absent = {key: sum(row["entities"][key] is None for row in made) for key in schema["properties"]}
        print(f"{arguments.out_dir / split}.jsonl: {len(made)} rows, null in {absent}")
    print(f"absent-field rate {ABSENT_RATE}; no document and no seller is in both files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
