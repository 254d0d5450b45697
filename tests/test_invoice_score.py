"""Invoice scores against counts worked out by hand, and generation that depends on neither batch nor process count."""

import itertools
import json
import os
import random
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import tiny_model as tiny_models

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "qwen3-8b-invoice"
sys.path.insert(0, str(RECIPE))

from field_scores import best_matching, count_document, field_names, key_errors, read_reply, score_replies  # noqa: E402
from field_values import amount_readings, date_readings, same_value  # noqa: E402
from invoice import canonical, load_schema, target_text  # noqa: E402

INVOICE = load_schema(RECIPE / "schema.json")
RECEIPT = load_schema(RECIPE / "schema_receipt.json")
SAMPLE = load_schema(RECIPE / "schema_sample.json")
NUMBER, DAY, TEXT = {"type": "number"}, {"type": "string", "format": "date"}, {"type": ["string", "null"]}


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values"),
    [  # the values under (point, comma) as the decimal mark; None is no reading
        ("9.00", ("9.00", None)),
        ("9,00", (None, "9.00")),
        ("100", ("100", "100")),
        ("1,234.50", ("1234.50", None)),
        ("1.234,50", (None, "1234.50")),
        ("1,234", ("1234", "1.234")),  # ambiguous
        ("1.234", ("1.234", "1234")),  # ambiguous
        ("0,125", (None, "0.125")),  # no group starts with 0
        ("1234.567", ("1234.567", None)),  # no group has four digits
        ("1,234,567", ("1234567", None)),
        ("1.234.567", (None, "1234567")),
        ("1,23,456.00", ("123456.00", None)),  # India
        ("1 234,50", (None, "1234.50")),
        ("1\u202f234,50 €", (None, "1234.50")),
        ("1'234.50", ("1234.50", None)),
        ("１２.５０", ("12.50", None)),  # full-width digits
        (".50", ("0.50", None)),
        ("RM 9.00", ("9.00", None)),
        ("RM9.00", ("9.00", None)),
        ("$9.00", ("9.00", None)),
        ("US$9.00", ("9.00", None)),
        ("9,00 EUR", (None, "9.00")),
        ("-9.00", ("-9.00", None)),
        ("9.00-", ("-9.00", None)),
        ("(9.00)", ("-9.00", None)),
        ("-$9.00", ("-9.00", None)),
        ("$-9.00", ("-9.00", None)),
        ("\u22129.00", ("-9.00", None)),
        ("--9.00", (None, None)),
        ("9.00 CR", (None, None)),  # credit or not: not read
        ("INV-0042", (None, None)),
        ("1,234,56", (None, None)),
        ("12 34", (None, None)),
        ("9.00 6%", (None, None)),
        ("1e3", (None, None)),
        ("", (None, None)),
        ("total", (None, None)),
    ],
)
def test_amount_forms(text, values):
    assert amount_readings(text) == {
        name: Decimal(value) for name, value in zip(("point", "comma"), values, strict=True) if value is not None
    }


@pytest.mark.parametrize(
    ("text", "days"),
    [
        ("2018-12-25", {"ymd": "2018-12-25"}),
        ("2018/03/04", {"ymd": "2018-03-04"}),
        ("20181225", {"ymd": "2018-12-25"}),
        ("25122018", {"dmy": "2018-12-25"}),
        ("25/12/2018", {"dmy": "2018-12-25"}),
        ("12/25/2018", {"mdy": "2018-12-25"}),
        ("03/04/2018", {"dmy": "2018-04-03", "mdy": "2018-03-04"}),  # ambiguous
        ("05/05/2018", {"dmy": "2018-05-05", "mdy": "2018-05-05"}),
        ("25.12.18", {"dmy": "2018-12-25", "ymd": "2025-12-18"}),  # ambiguous: which end is the year
        ("31/12/99", {"dmy": "1999-12-31"}),
        ("25 DEC 2018", {"dmy": "2018-12-25"}),
        ("25-Dec-18", {"dmy": "2018-12-25"}),
        ("Dec 25, 2018", {"mdy": "2018-12-25"}),
        ("December 25th 2018", {"mdy": "2018-12-25"}),
        ("3rd Sept. 2018", {"dmy": "2018-09-03"}),
        ("(25/12/2018)", {"dmy": "2018-12-25"}),
        ("25/12/2018 8:13:39 PM", {"dmy": "2018-12-25"}),
        ("2018-12-25T20:13:39Z", {"ymd": "2018-12-25"}),
        ("2018-02-30", {}),
        ("31/02/2018", {}),
        ("December 2018", {}),
        ("25/12", {}),
        ("12", {}),
        ("tomorrow", {}),
        ("", {}),
    ],
)
def test_date_forms(text, days):
    assert {name: day.isoformat() for name, day in date_readings(text).items()} == days


@pytest.mark.parametrize(
    ("gold", "predicted", "field", "exact", "normalised"),
    [
        (9.0, 9, NUMBER, True, True),
        (9.0, 9.01, NUMBER, False, False),
        (9.0, 900, NUMBER, False, False),
        (9.0, -9.0, NUMBER, False, False),
        (9.0, "9,00", NUMBER, False, True),
        (1234.0, "1,234.00", NUMBER, False, True),
        (1234.0, "1.234", NUMBER, False, False),  # may be 1.234
        (1.234, "1.234", NUMBER, False, False),  # may be 1234
        (1.0, True, NUMBER, False, False),
        (0.0, 0, NUMBER, True, True),
        (1.0, [1.0], NUMBER, False, False),
        (1e22, 1e22, NUMBER, True, True),
        ("2018-12-25", "2018-12-25", DAY, True, True),
        ("2018-12-25", "25/12/2018", DAY, False, True),
        ("2018-12-25", "12/25/2018", DAY, False, True),
        ("2018-12-25", "25 Dec 2018", DAY, False, True),
        ("2018-04-03", "03/04/2018", DAY, False, False),  # not guessed
        ("2018-03-04", "03/04/2018", DAY, False, False),  # not guessed
        ("2018-05-05", "05/05/2018", DAY, False, True),  # the same either way
        ("2018-12-25", "2018-12-26", DAY, False, False),
        ("2018-12-25", 20181225, DAY, False, True),
        ("BOOK TA .K (TAMAN DAYA)", "Book Ta K Taman Daya", TEXT, False, True),
        ("Straße 1", "STRASSE 1", TEXT, False, True),
        ("INV-0042", "INV 0042", TEXT, False, True),
        ("0042", "42", TEXT, False, False),
        ("42", 42, TEXT, False, True),
        ("9.00", "9.00", TEXT, True, True),
        ("9.00", "900", TEXT, False, False),
        ("9.00", "-9.00", TEXT, False, False),
        ("1.234", "1,234", TEXT, False, False),
        ("25/12/2018", "25-12-2018", TEXT, False, True),
        ("03/04/2018", "03-04-2018", TEXT, False, True),  # the same whichever comes first
        ("03/04/2018", "04/03/2018", TEXT, False, False),
        ("1/12/2018", "11/2/2018", TEXT, False, False),
        ("***", "---", TEXT, False, False),
        ("credit_note", "Credit Note", TEXT, False, True),
        ("a", {"a": 1}, TEXT, False, False),
    ],
)
def test_same_value(gold, predicted, field, exact, normalised):
    assert same_value(gold, predicted, field) == (exact, normalised)
    if not isinstance(predicted, (bool, list, dict)):
        assert same_value(predicted, gold, field)[1] == normalised


# ---- replies ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "strict", "value", "repeated"),
    [
        ('{"a": 1}', True, {"a": 1}, 0),
        ('\n {"a": 1} \n', True, {"a": 1}, 0),
        ('```json\n{"a": 1}\n```', False, {"a": 1}, 0),
        ('```\n{"a": 1}\n```', False, {"a": 1}, 0),
        ('Here it is: {"a": 1}. Anything else?', False, {"a": 1}, 0),
        ('The {keys} you asked for:\n{"a": 1}', False, {"a": 1}, 0),
        ('<think>\n\n</think>\n\n{"a": 1}', False, {"a": 1}, 0),
        ('<think>{"a": 2}?</think>{"a": 1}', False, {"a": 1}, 0),
        ('<think>perhaps {"a": 2}', False, None, 0),
        ('{"a": 1} {"a": 2}', False, {"a": 1}, 0),
        ('{"a": 1, "a": 2}', True, {"a": 2}, 1),
        ('{"i": [{"a": 1}, {"a": 2, "a": 3}], "i2": 0}', True, {"i": [{"a": 1}, {"a": 3}], "i2": 0}, 1),
        ('{"a": 1', False, None, 0),
        ('{"items": [{"a": 1}, {"a": 2', False, None, 0),  # the whole line item inside a cut object is no answer
        ('```json\n{"a": 1', False, None, 0),
        ("{'a': 1}", False, None, 0),
        ('{"a": NaN}', False, None, 0),
        ('"text"', False, None, 0),
        ("null", False, None, 0),
        ("[" * 100_000, False, None, 0),
        ("", False, None, 0),
        (None, False, None, 0),
    ],
)
def test_read_reply(text, strict, value, repeated):
    reply = read_reply(text)
    assert (reply.strict, reply.value, reply.repeated_keys) == (strict, value, repeated)


# ---- counts ----------------------------------------------------------------------------------------------------------


def counts(gold, predicted, schema=INVOICE):
    """{field: (exact, normalised, missed, invented, wrong)} of the fields that count."""
    rows = count_document(canonical(gold, schema), predicted, schema).tolist()
    return {name: tuple(row) for name, row in zip(field_names(schema), rows, strict=True) if any(row)}


HIT, SAME, MISSED, INVENTED, WRONG = (1, 1, 0, 0, 0), (0, 1, 0, 0, 0), (0, 0, 1, 0, 0), (0, 0, 0, 1, 0), (0, 0, 0, 0, 1)


def test_field_names_follow_the_schema():
    names = ["doc_type", "invoice_no", "date", "seller", "client", "subtotal", "tax", "total"]
    assert field_names(INVOICE) == [*names, "items[].name", "items[].quantity", "items[].price"]


@pytest.mark.parametrize(
    ("gold", "predicted", "expected"),
    [
        ({}, {}, {}),  # absent on both sides, however it is written
        ({}, {"tax": None, "seller": "", "client": "  ", "items": []}, {}),
        ({"tax": 0}, {"tax": None}, {"tax": MISSED}),  # null, 0 and missing are three things
        ({"tax": 0}, {}, {"tax": MISSED}),
        ({"tax": 0}, {"tax": 0}, {"tax": HIT}),
        ({}, {"tax": 0}, {"tax": INVENTED}),
        ({"tax": 1}, {"tax": 0}, {"tax": WRONG}),
        ({"tax": 1}, {"tax": "1,00"}, {"tax": SAME}),
        ({"seller": "A"}, {"seller": "null"}, {"seller": WRONG}),
        ({"seller": "A", "tax": 1}, None, {"seller": MISSED, "tax": MISSED}),
        ({"seller": "A"}, {"seller": "a", "vat": 1}, {"seller": SAME}),
        ({"seller": "A"}, {"seller": {"name": "A"}}, {"seller": WRONG}),
        ({"items": [{"name": "Tea"}]}, {"items": "Tea"}, {"items[].name": MISSED}),
        ({"items": [{"name": "Tea"}]}, {"items": ["Tea"]}, {"items[].name": MISSED}),
    ],
)
def test_field_counts(gold, predicted, expected):
    assert counts(gold, predicted) == expected


TEA, INK, MUG = ({"name": n, "quantity": q, "price": p} for n, q, p in (("Tea", 2, 5), ("Ink", 1, 8), ("Mug", 2, 8)))


@pytest.mark.parametrize(
    ("gold", "predicted", "expected"),
    [  # per field of an item: name, quantity, price
        ([TEA, INK], [TEA, INK], [(2, 2, 0, 0, 0)] * 3),
        ([TEA, INK], [TEA], [(1, 1, 1, 0, 0)] * 3),
        ([TEA], [TEA, TEA], [(1, 1, 0, 1, 0)] * 3),  # a gold item is matched once
        ([TEA, TEA], [TEA], [(1, 1, 1, 0, 0)] * 3),
        ([TEA], [INK], [(0, 0, 1, 1, 0)] * 3),  # nothing in common: missed and invented
        ([TEA], [TEA | {"price": 6}], [HIT, HIT, WRONG]),
        ([TEA], [{"name": "tea", "quantity": None, "price": "5,00"}], [SAME, MISSED, SAME]),
        # Pairing Tea with the first entry would leave Mug with nothing; the best matching keeps 1 + 3 fields.
        (
            [TEA, MUG],
            [{"name": "Mug", "quantity": 2, "price": 8}, {"name": "T", "quantity": 9, "price": 5}],
            [(1, 1, 0, 0, 1), (1, 1, 0, 0, 1), (2, 2, 0, 0, 0)],
        ),
    ],
)
def test_item_counts_whatever_the_order(gold, predicted, expected):
    names = [f"items[].{key}" for key in ("name", "quantity", "price")]
    for left, right in itertools.product(itertools.permutations(gold), itertools.permutations(predicted)):
        assert counts({"items": list(left)}, {"items": list(right)}) == dict(zip(names, expected, strict=True))


def test_item_counts_do_not_depend_on_the_order_of_many_alike_items():
    draw = random.Random(0)
    for _ in range(30):
        gold, predicted = (
            [
                {
                    "name": draw.choice(["Tea", "tea", "Ink", None]),
                    "quantity": draw.choice([1, 2]),
                    "price": draw.choice([5, 8]),
                }
                for _ in range(draw.randint(1, 6))
            ]
            for _ in range(2)
        )
        expected = counts({"items": gold}, {"items": predicted})
        for _ in range(5):
            draw.shuffle(gold)
            draw.shuffle(predicted)
            assert counts({"items": gold}, {"items": predicted}) == expected


def test_best_matching_is_the_best_of_all():
    draw = random.Random(1)
    for rows, columns in itertools.product(range(1, 6), repeat=2):
        for _ in range(10):
            weights = [[draw.choice([0, 0, 1, 2, 3, 7]) for _ in range(columns)] for _ in range(rows)]
            wide = weights if rows <= columns else [list(column) for column in zip(*weights, strict=True)]
            best = max(
                sum(row[j] for row, j in zip(wide, order, strict=True))
                for order in itertools.permutations(range(len(wide[0])), len(wide))
            )
            pairs = best_matching(weights)
            assert sum(weights[i][j] for i, j in pairs) == best
            assert len({i for i, _ in pairs}) == len({j for _, j in pairs}) == len(pairs)
            assert all(weights[i][j] for i, j in pairs)
    assert best_matching([]) == best_matching([[]]) == []


def test_nested_objects_and_lists_of_plain_values():
    schema = {
        "type": "object",
        "properties": {
            "shop": {"type": ["object", "null"], "properties": {"name": TEXT, "town": TEXT}},
            "tags": {"type": ["array", "null"], "items": {"type": "string"}},
        },
    }
    assert field_names(schema) == ["shop.name", "shop.town", "tags[]"]
    gold = {"shop": {"name": "A", "town": "B"}, "tags": ["x", "y"]}
    found = counts(gold, {"shop": {"name": "A"}, "tags": ["z", "Y", "x"]}, schema)
    assert found == {"shop.name": HIT, "shop.town": MISSED, "tags[]": (1, 2, 0, 1, 0)}
    assert counts(gold, {"shop": None, "tags": None}, schema)["tags[]"] == (0, 0, 2, 0, 0)


def test_key_errors_at_every_depth():
    assert key_errors({"company": "A", "date": None, "vat": 1, "iban": 2}, RECEIPT) == (2, 2)
    full = dict.fromkeys(INVOICE["properties"])
    assert key_errors(full | {"items": [{"name": "Tea", "vat": 1}, TEA]}, INVOICE) == (1, 2)
    assert key_errors(full | {"items": "Tea"}, INVOICE) == (0, 0)


# ---- the report ------------------------------------------------------------------------------------------------------


def receipt(company, date, address, total):
    return {"company": company, "date": date, "address": address, "total": total}


GOLDS = [
    receipt("A Ltd", "25/12/2018", "1 Road", "9.00"),
    receipt("B Ltd", "03/04/2018", None, "5.00"),
    receipt("C Ltd", "01/02/2018", "3 Road", None),
    receipt("D Ltd", None, None, None),
]
REPLIES = [
    json.dumps(receipt("A LTD.", "25/12/2018", "1 Road", "9.00")),  # company the same, the rest exact
    "```json\n" + json.dumps(receipt("B Ltd", "04/03/2018", "2 Road", None) | {"vat": 1}) + "\n```",
    '{"company": "C Ltd", "date": "01/02/2018", "addr',  # cut
    '{"company": "X", "company": "D Ltd", "date": null, "address": null}',  # repeated, and total is missing
]


def test_report_against_hand_counts():
    report = score_replies(GOLDS, REPLIES, RECEIPT, limit_hits=[False, False, True, False], names=list("abcd"))
    expected = {
        "documents": 4,
        "strict_json": 2,
        "strict_json_rate": 0.5,
        "lenient_json": 3,
        "lenient_json_rate": 0.75,
        "limit_hits": 1,
        "unparseable": 1,
        "schema_violations": 2,  # vat is extra, total is missing
        "documents_with_violations": 2,
        "extra_keys": 1,
        "missing_keys": 1,
        "repeated_keys": 1,
    }
    assert {key: report[key] for key in expected} == expected
    table = {
        name: tuple(field[key] for key in ("gold", "predicted", "exact", "normalised", "missed", "invented", "wrong"))
        for name, field in report["fields"].items()
    }
    assert table == {
        "company": (4, 3, 2, 3, 1, 0, 0),
        "date": (3, 2, 1, 1, 1, 0, 1),
        "address": (2, 2, 1, 1, 1, 1, 0),
        "total": (2, 1, 1, 1, 1, 0, 0),
    }
    f1 = {"company": 6 / 7, "date": 2 / 5, "address": 2 / 4, "total": 2 / 3}
    assert {name: field["f1"] for name, field in report["fields"].items()} == pytest.approx(f1)
    assert report["micro_f1"] == pytest.approx(2 * 6 / (11 + 8))
    assert report["micro_f1_exact"] == pytest.approx(2 * 5 / (11 + 8))
    assert report["macro_f1"] == pytest.approx(sum(f1.values()) / 4)
    low, high = report["micro_f1_interval"]
    assert 0 <= low < report["micro_f1"] < high <= 1
    assert [entry["document"] for entry in report["worst"]] == ["c", "b"]  # a and d have nothing wrong
    assert report["worst"][0]["f1"] == 0 and report["worst"][0]["limit_hit"]
    assert report["worst"][1]["gold"] == GOLDS[1] and report["worst"][1]["prediction"] == REPLIES[1]
    assert report["worst"][1]["f1"] == pytest.approx(2 / 6)
    assert json.loads(json.dumps(report)) == report


def test_report_does_not_depend_on_the_order_of_the_documents_but_for_the_intervals():
    forward = score_replies(GOLDS, REPLIES, RECEIPT)
    backward = score_replies(GOLDS[::-1], REPLIES[::-1], RECEIPT)
    for key in ("micro_f1", "macro_f1", "micro_f1_exact", "fields", "schema_violations"):
        assert forward[key] == backward[key]
    assert forward == score_replies(GOLDS, REPLIES, RECEIPT)  # the bootstrap is seeded


def test_report_of_nothing_to_find_and_of_all_right():
    absent = receipt(None, None, None, None)
    report = score_replies([absent], [json.dumps(absent)], RECEIPT)
    assert report["micro_f1"] is None and report["micro_f1_interval"] is None and report["worst"] == []
    report = score_replies([GOLDS[0]], [target_text(GOLDS[0], RECEIPT)], RECEIPT)
    assert report["micro_f1"] == report["macro_f1"] == report["micro_f1_exact"] == 1
    assert report["micro_f1_interval"] == [1, 1] and report["worst"] == []


def test_bootstrap_interval_has_about_the_width_of_theory():
    """100 documents of one field, 70 right: the standard error is sqrt(.7 * .3 / 100) = 0.046, the interval 0.18."""
    golds = [receipt("A", None, None, None)] * 100
    replies = [target_text(receipt("A" if i < 70 else "B", None, None, None), RECEIPT) for i in range(100)]
    report = score_replies(golds, replies, RECEIPT)
    low, high = report["micro_f1_interval"]
    assert report["micro_f1"] == pytest.approx(0.7)
    assert (high - low) == pytest.approx(2 * 1.96 * np.sqrt(0.7 * 0.3 / 100), rel=0.15)


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="one length"):
        score_replies(GOLDS, REPLIES[:2], RECEIPT)
    with pytest.raises(ValueError, match="one length"):
        score_replies([], [], RECEIPT)


# ---- generation and the program --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny-qwen3"
    tiny_models.main(["qwen3", str(folder)])
    return folder


TEST_ROWS = ROOT / "tests" / "data" / "receipts" / "test.jsonl"


@pytest.fixture(scope="module")
def single_answers(tiny_model):
    import score
    import torch

    documents = score.read_documents(str(TEST_ROWS), SAMPLE, "text", "entities", limit=6)
    model, tokenizer = score.load_model(str(tiny_model), torch.float32, "cpu")
    prompts = [prompt for _, prompt, _ in documents]
    options = {"max_new_tokens": 12, "chat_template_kwargs": {"enable_thinking": False}, "progress": False}
    answers = score.generate(model, tokenizer, prompts, batch_size=1, **options)
    return model, tokenizer, prompts, options, answers


def test_batch_size_does_not_change_the_answers(single_answers):
    import score

    model, tokenizer, prompts, options, answers = single_answers
    assert len({text for text, _ in answers}) > 1
    kept = model.generation_config
    for batch_size in (4, 6):
        assert score.generate(model, tokenizer, prompts, batch_size=batch_size, **options) == answers
    assert model.generation_config is kept  # the model's own settings are put back


def test_answers_are_greedy_end_at_the_stop_token_and_tell_limit_hits_apart(single_answers):
    import score
    import torch

    model, tokenizer, prompts, options, answers = single_answers
    ids = tokenizer.apply_chat_template(
        prompts[0], add_generation_prompt=True, return_dict=True, return_tensors="pt", enable_thinking=False
    )["input_ids"]
    start, steps = ids.shape[1], 12
    with torch.inference_mode():
        for _ in range(steps):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    by_hand = ids[0, start:].tolist()
    assert answers[0] == (tokenizer.decode(by_hand, skip_special_tokens=True), True)
    # Make the fifth token of that answer the stop token: the answer ends there, and no limit is hit.
    stop = by_hand[4]
    end = by_hand.index(stop)
    kept = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [stop]
    try:
        stopped = score.generate(model, tokenizer, prompts, batch_size=4, **options)
    finally:
        model.generation_config.eos_token_id = kept
    assert stopped[0] == (tokenizer.decode(by_hand[:end], skip_special_tokens=True), False)


def test_prompt_that_does_not_fit_is_refused_by_name(single_answers):
    import score

    model, tokenizer, prompts, _, _ = single_answers
    with pytest.raises(ValueError, match=r"document first: .* positions"):
        score.generate(model, tokenizer, prompts[:1], max_new_tokens=10**6, names=["first"], progress=False)


def test_adapter_folder_is_loaded_on_its_base(tiny_model, tmp_path):
    import peft
    import score
    import torch
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    adapter = peft.get_peft_model(base, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
    adapter.save_pretrained(tmp_path / "adapter")
    model, tokenizer = score.load_model(str(tmp_path / "adapter"), torch.float32, "cpu")
    ids = torch.tensor([tokenizer("TOTAL 9.00")["input_ids"]])
    with torch.inference_mode():
        found, expected = model(ids).logits, adapter.eval()(ids).logits
        with adapter.disable_adapter():
            plain = adapter(ids).logits
    assert torch.equal(found, expected) and not torch.allclose(found, plain)


def program(launcher, *arguments):
    command = [*launcher, str(RECIPE / "score.py"), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT)


def test_two_processes_share_the_work_and_write_the_same_answers(tiny_model, single_answers, tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    columns = ["--schema_file", RECIPE / "schema_sample.json", "--text_column", "text", "--target_column", "entities"]
    options = ["--limit", 6, "--batch_size", 2, "--max_new_tokens", 12, "--dtype", "float32"]
    options += ["--chat_template_kwargs", '{"enable_thinking": false}']
    files = ["--output", tmp_path / "new" / "report.json", "--predictions", tmp_path / "answers.jsonl"]
    result = program(launcher, tiny_model, TEST_ROWS, *columns, *options, *files)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(row["prediction"], row["limit_hit"]) for row in rows] == single_answers[-1]
    assert [row["document"] for row in rows] == [f"test-{number:05}" for number in range(6)]
    report = json.loads((tmp_path / "new" / "report.json").read_text(encoding="utf-8"))
    assert report["processes"] == 2 and report["documents"] == 6
    scored = score_replies(
        [row["gold"] for row in rows],
        [row["prediction"] for row in rows],
        SAMPLE,
        limit_hits=[row["limit_hit"] for row in rows],
        names=[row["document"] for row in rows],
    )
    assert {key: report[key] for key in scored} == scored
    assert result.stdout.count("strict JSON") == 1  # one process reports
    assert "unparseable 6" in result.stdout


def test_program_names_a_bad_row_and_exits_non_zero(tmp_path, monkeypatch, capsys):
    import score

    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "DOC", "entities": {}}\n{"text": "DOC", "entities": {"totl": 1}}\n')
    columns = [
        "--schema_file",
        str(RECIPE / "schema_sample.json"),
        "--text_column",
        "text",
        "--target_column",
        "entities",
    ]
    monkeypatch.setattr(sys, "argv", ["score.py", str(tmp_path), str(data), *columns])
    assert score.main() == 1
    assert f"{data}, row 2: totl: this key is not in the schema" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--chat_template_kwargs", "thinking"], "expected a JSON object"),
        (["--batch_size", "0"], "expected a whole number"),
        (["--max_new", "5"], "unrecognized arguments"),
        (["--engine", "sglang"], "invalid choice"),
    ],
)
def test_bad_flags_are_refused(arguments, reason, capsys):
    import score

    with pytest.raises(SystemExit) as caught:
        score.parse_arguments(["model", "data.jsonl", *arguments])
    assert caught.value.code == 2 and reason in capsys.readouterr().err


def test_a_model_that_is_not_there_is_named(tmp_path):
    import score
    import torch

    with pytest.raises(ValueError, match=r"nothere: it is not a folder here, and from the Hub cannot be loaded"):
        score.load_model(str(tmp_path / "nothere"), torch.float32, "cpu")


# ---- held to the schema, and vLLM ------------------------------------------------------------------------------------

# Fields that a random model can fill within few tokens: free text would never end.
CLOSED = {
    "type": "object",
    "properties": {
        "doc_type": {"type": ["string", "null"], "enum": ["invoice", "credit_note", None]},
        "paid": {"type": "boolean"},
        "date": {"type": "string", "format": "date"},
        "items": {
            "type": "array",
            "maxItems": 2,
            "items": {"type": "object", "properties": {"in_stock": {"type": "boolean"}}},
        },
    },
}


def test_constrained_answers_follow_the_schema_whatever_the_model_and_the_batch(single_answers):
    import score

    from invoice import check_target

    model, tokenizer, prompts, options, free = single_answers
    prompts = prompts[:3]
    options = options | {"max_new_tokens": 120, "schema": CLOSED}
    alone = score.generate(model, tokenizer, prompts, batch_size=1, **options)
    assert score.generate(model, tokenizer, prompts, batch_size=3, **options) == alone
    assert not any(limit_hit for _, limit_hit in alone)
    for text, _ in alone:
        value = json.loads(text)
        assert check_target(value, CLOSED) == []
        assert list(value) == ["doc_type", "paid", "date", "items"]  # no key is left out, in the schema's order
        assert text == json.dumps(value, separators=(",", ":"))  # the trained form: no blanks
    assert free[:3] != alone


def test_every_shipped_target_is_allowed_by_the_constraint(single_answers):
    """A constraint that forbids what the model was trained to write would cost score in silence."""
    import generation

    _, tokenizer, _, _, _ = single_answers
    rows = [json.loads(line) for line in TEST_ROWS.read_text(encoding="utf-8").splitlines()]
    targets = [(SAMPLE, row["entities"]) for row in rows]
    item = {"name": 'Tea "green", 1/2 kg', "quantity": 2, "price": -1.5}
    targets.append((INVOICE, {"doc_type": "credit_note", "date": "2024-02-29", "total": -12, "items": [item, item]}))
    targets += [(INVOICE, {}), (RECEIPT, {"company": "KEDAI MÜLLER & SÖHNE", "total": "RM 9.00"})]
    for schema, value in targets:
        grammar = generation.SchemaGrammar(schema, tokenizer, [tokenizer.eos_token_id])
        (matcher,) = grammar.matchers(1, len(tokenizer))
        ids = tokenizer.encode(target_text(value, schema), add_special_tokens=False)
        assert matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_without_llguidance_the_message_names_it(single_answers, monkeypatch):
    import generation

    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match="pip install llguidance"):
        generation.SchemaGrammar(SAMPLE, single_answers[1], [0])


VLLM = {  # answers with the last three tokens of the prompt; the second of two prompts hits the limit
    "__init__.py": """
import json, types
class SamplingParams:
    def __init__(self, **given): self.given = given
class LLM:
    def __init__(self, **given): self.given = given
    def generate(self, prompts, sampling, lora_request=None):
        json.dump({"engine": self.given, "sampling": {k: v for k, v in sampling.given.items() if k != "structured_outputs"},
                   "schema": getattr(sampling.given["structured_outputs"], "json", None)}, open("asked.json", "w"))
        ends = ["stop", "length"]
        return [types.SimpleNamespace(outputs=[types.SimpleNamespace(
            token_ids=prompt["prompt_token_ids"][-3:], finish_reason=end)]) for prompt, end in zip(prompts, ends)]
""",
    "lora/__init__.py": "",
    "lora/request.py": "class LoRARequest: pass",
    "sampling_params.py": "class StructuredOutputsParams:\n    def __init__(self, json): self.json = json",
}


def test_vllm_gets_the_same_token_ids_and_its_answers_are_read_the_same_way(
    tiny_model, single_answers, tmp_path, monkeypatch
):
    """With a stand-in for vLLM, which runs on GPUs: the hand-over, not vLLM, is what this shows."""
    import generation

    _, tokenizer, prompts, _, _ = single_answers
    for name, source in VLLM.items():
        (tmp_path / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "vllm" / name).write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    kwargs = {"enable_thinking": False}
    answers = generation.vllm_answers(
        str(tiny_model),
        prompts[:2],
        python=sys.executable,
        dtype="float32",
        max_new_tokens=7,
        schema=CLOSED,
        chat_template_kwargs=kwargs,
    )
    encoded = generation.encode_prompts(tokenizer, prompts[:2], kwargs)
    assert answers[0] == (tokenizer.decode(encoded[0][-3:], skip_special_tokens=True), False)
    assert answers[1] == (tokenizer.decode(encoded[1][-3:], skip_special_tokens=True), True)
    asked = json.loads((tmp_path / "asked.json").read_text())
    assert asked["sampling"]["temperature"] == 0 and asked["sampling"]["max_tokens"] == 7
    assert tokenizer.eos_token_id in asked["sampling"]["stop_token_ids"]
    assert asked["engine"]["generation_config"] == "vllm"  # not the model's sampling
    assert asked["schema"]["required"] == list(CLOSED["properties"])


def test_without_vllm_the_message_says_where_it_is_looked_for(tiny_model, single_answers, capfd):
    import generation

    with pytest.raises(ValueError, match="--engine vllm"):
        generation.vllm_answers(str(tiny_model), single_answers[2][:1], python=sys.executable, dtype="float32")
    assert "vLLM is not installed for" in capfd.readouterr().err
