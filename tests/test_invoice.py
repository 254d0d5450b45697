"""The schema, the prompt, the target and the rows of the invoice recipe: canonical JSON, bad rows named."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "qwen3-8b-invoice"
SROIE = ROOT.parent / "shared" / "data" / "sroie"
sys.path.insert(0, str(RECIPE))

from inputs import read_file  # noqa: E402
from invoice import (  # noqa: E402
    canonical,
    check_target,
    load_schema,
    prompt_messages,
    target_text,
    to_prompt_completion,
)

SCHEMAS = ["schema.json", "schema_receipt.json", "schema_sample.json"]
INVOICE = load_schema(RECIPE / "schema.json")
RECEIPT = load_schema(RECIPE / "schema_receipt.json")
GOOD = {
    "doc_type": "credit_note",
    "invoice_no": "CN-7",
    "date": "2024-02-29",
    "seller": "Müller & Söhne",
    "client": None,
    "subtotal": 10,
    "tax": 2.5,
    "total": 12.5,
    "items": [{"name": "Tea", "quantity": 2, "price": 5.0}],
}


def objects(schema):
    """Every object of a schema, at any depth."""
    if "properties" in schema:
        yield schema
        for field in schema["properties"].values():
            yield from objects(field)
    if "items" in schema:
        yield from objects(schema["items"])


@pytest.mark.parametrize("name", SCHEMAS)
def test_shipped_schema_requires_every_key_allows_null_and_describes_in_one_line(name):
    for node in objects(load_schema(RECIPE / name)):
        assert node["additionalProperties"] is False
        assert node["required"] == list(node["properties"])
        for field in node["properties"].values():
            assert "null" in field["type"]
            assert field["description"].strip() and "\n" not in field["description"]


def test_seed_target_fields():
    assert list(INVOICE["properties"]) == [
        "doc_type",
        "invoice_no",
        "date",
        "seller",
        "client",
        "subtotal",
        "tax",
        "total",
        "items",
    ]
    assert list(INVOICE["properties"]["items"]["items"]["properties"]) == ["name", "quantity", "price"]
    assert list(RECEIPT["properties"]) == ["company", "date", "address", "total"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not JSON"),
        ('{"type": "objekt"}', "not a valid JSON Schema"),
        ('{"type": "array", "items": {"type": "string"}}', "the top must"),
        ('{"type": "object", "properties": {"a": {"type": ["string", "number"]}}}', "a: .type. must be one type"),
        ('{"type": "object", "properties": {"a": {}}}', "a: .type. must be one type"),
        ('{"type": "object", "properties": {"a": {"type": "array"}}}', "a: an array needs"),
        ('{"type": "object", "properties": {"a": {"type": "object"}}}', "a: an object needs"),
        ('{"type": "object", "properties": {"a": {"type": "string"}, "a": {"type": "string"}}}', "'a' stands twice"),
    ],
)
def test_bad_schema_is_refused_with_the_file_named(tmp_path, content, reason):
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=reason) as caught:
        load_schema(path)
    assert str(path) in str(caught.value)


def test_missing_schema_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nothere\.json: the schema file cannot be read"):
        load_schema(tmp_path / "nothere.json")


def test_prompt_is_one_user_message_with_the_fields_in_schema_order_and_the_document():
    (message,) = prompt_messages("\nTOTAL 9.00\n", INVOICE)
    assert message["role"] == "user"
    lines = message["content"].split("\n")
    names = [line.split(":")[0].split(" (")[0] for line in lines[1:-3]]
    assert names == [*INVOICE["properties"], "  name", "  quantity", "  price"]
    assert lines[-3:] == ["<document>", "TOTAL 9.00", "</document>"]
    assert "doc_type (invoice/receipt/credit_note): " in message["content"]
    assert "date (YYYY-MM-DD): " in message["content"]
    # A short fixed part: some 75 tokens at 4 characters each.
    assert len(prompt_messages("", RECEIPT)[0]["content"]) < 300


def test_target_is_canonical_json():
    shuffled = dict(reversed(GOOD.items()))
    del shuffled["client"]
    expected = (
        '{"doc_type":"credit_note","invoice_no":"CN-7","date":"2024-02-29","seller":"Müller & Söhne","client":null,'
        '"subtotal":10.0,"tax":2.5,"total":12.5,"items":[{"name":"Tea","quantity":2.0,"price":5.0}]}'
    )
    assert target_text(shuffled, INVOICE) == expected
    assert target_text(json.loads(expected), INVOICE) == expected


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0.0"),
        (-0.0, "0.0"),
        (-3, "-3.0"),
        (9.10, "9.1"),
        (1234.5, "1234.5"),
        (1e-7, "0.0000001"),
        (1e22, "1" + "0" * 22 + ".0"),
    ],
)
def test_numbers_have_a_decimal_point_and_no_exponent(number, text):
    assert f'"total":{text},' in target_text({"total": number}, INVOICE)


@pytest.mark.parametrize("absent", ["", "  ", None])
def test_empty_text_and_missing_keys_become_null(absent):
    assert canonical({"company": absent}, RECEIPT) == dict.fromkeys(["company", "date", "address", "total"])
    assert canonical({"items": []}, INVOICE)["items"] is None
    assert target_text({"items": [{"name": absent}]}, INVOICE).endswith(
        '"items":[{"name":null,"quantity":null,"price":null}]}'
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"vat_id": "x"}, "vat_id: this key is not in the schema"),
        ({"items": [{"name": "Tea", "colour": "red"}]}, r"items\[0\]\.colour: this key is not in the schema"),
        ({"total": "12.50"}, "total: '12.50' is not of type 'number'"),
        ({"total": True}, "total: True is not of type 'number'"),
        ({"total": float("nan")}, "total: nan is not a JSON number"),
        ({"date": "29/02/2024"}, "date: '29/02/2024' is not a 'date'"),
        ({"date": "2023-02-29"}, "date: '2023-02-29' is not a 'date'"),
        ({"doc_type": "bill"}, "doc_type: 'bill' is not one of"),
        ({"items": {"name": "Tea"}}, "items: .* is not of type 'array'"),
        ({"items": [{"name": 7}]}, r"items\[0\]\.name: 7 is not of type 'string'"),
    ],
)
def test_a_target_that_breaks_the_schema_is_refused_with_its_field(change, reason):
    with pytest.raises(ValueError, match=reason):
        target_text(GOOD | change, INVOICE)


def test_check_target_lists_every_reason():
    assert check_target(GOOD, INVOICE) == []
    reasons = check_target({**GOOD, "date": "yesterday", "total": "1"} | {"extra": 1}, INVOICE)
    assert len(reasons) == 3
    assert check_target([], RECEIPT) == ["top: [] is not of type 'object'"]
    assert len(check_target({}, RECEIPT)) == 4  # it judges what stands there: four keys are missing


def test_rows_in_two_columns_and_as_chat_give_the_same_pair_and_nothing_else():
    answer = target_text(GOOD, INVOICE)
    expected = {
        "prompt": prompt_messages("DOC", INVOICE),
        "completion": [{"role": "assistant", "content": answer}],
    }
    chat = [
        {"role": "system", "content": "You read invoices."},
        {"role": "user", "content": "DOC"},
        {"role": "assistant", "content": json.dumps(GOOD, indent=1)},
    ]
    assert to_prompt_completion({"ocr": "DOC", "gold": GOOD, "id": 1}, INVOICE, "ocr", "gold") == expected
    assert to_prompt_completion({"ocr": "DOC", "gold": json.dumps(GOOD)}, INVOICE, "ocr", "gold") == expected
    assert to_prompt_completion({"messages": chat, "id": 1}, INVOICE) == expected
    assert to_prompt_completion({"messages": chat[1:]}, INVOICE) == expected


USER = {"role": "user", "content": "DOC"}


@pytest.mark.parametrize(
    ("row", "columns", "reason"),
    [
        ({"text": " ", "gold": GOOD}, ("text", "gold"), "the document must be text and not empty"),
        ({"text": None, "gold": GOOD}, ("text", "gold"), "the document must be text and not empty"),
        ({"text": "DOC", "gold": "{'a': 1}"}, ("text", "gold"), "the target is not JSON"),
        ({"text": "DOC", "gold": '{"total": 1, "total": 2}'}, ("text", "gold"), "'total' stands twice"),
        ({"text": "DOC", "gold": '{"total": NaN}'}, ("text", "gold"), "NaN is not a JSON number"),
        ({"text": "DOC", "gold": None}, ("text", "gold"), "None is not of type 'object'"),
        ({"text": "DOC", "gold": '{"date": "1.2.24"}'}, ("text", "gold"), "date: '1.2.24' is not a 'date'"),
        ({"text": "DOC", "gold": GOOD}, ("text", None), "both --text_column and --target_column"),
        ({"messages": []}, (None, None), "messages must be a list and not empty"),
        ({"messages": [USER]}, (None, None), r"the roles are \['user'\]"),
        ({"messages": [{"from": "human"}, USER]}, (None, None), r"the roles are \[None, 'user'\]"),
        ({"messages": [USER, {"role": "assistant", "content": GOOD}]}, (None, None), "must be JSON in a string"),
        ({"messages": [USER, {"role": "assistant", "content": "Sorry."}]}, (None, None), "the target is not JSON"),
    ],
)
def test_bad_rows_are_refused_with_the_reason(row, columns, reason):
    with pytest.raises(ValueError, match=reason):
        to_prompt_completion(row, INVOICE, *columns)


@pytest.mark.parametrize(
    ("columns", "wanted"),
    [(("text", "gold"), "the columns 'text' and 'gold'"), ((None, None), "`messages`, or the two columns")],
)
def test_other_columns_are_told_apart_from_bad_rows(columns, wanted):
    with pytest.raises(KeyError, match=wanted):
        to_prompt_completion({"text": "DOC", "answer": GOOD}, INVOICE, *columns)


@pytest.mark.skipif(
    not SROIE.is_dir(), reason="the SROIE receipts are not beside the repository (../shared/data/sroie)"
)
def test_every_sroie_row_converts():
    rows = [*read_file(SROIE / "train.jsonl")]
    assert len(rows) == 626
    empty = 0
    for row in rows:
        pair = to_prompt_completion(row, RECEIPT, "text", "entities")
        target = json.loads(pair["completion"][0]["content"])
        assert {key: value or "" for key, value in target.items()} == row["entities"]
        empty += sum(value is None for value in target.values())
    assert empty == 2  # one address and one total have no label
