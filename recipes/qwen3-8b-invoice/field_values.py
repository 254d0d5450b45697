"""When two values of a field are the same: amounts and dates by value, other text by letters and digits.

By the field's type in the schema:

- number: by value. A JSON number is its value. A string may carry a currency mark, a sign and grouping. With both `.`
  and `,` the last one is the decimal mark; a lone one is the decimal mark unless exactly three digits follow it and it
  could group thousands: 1,234 and 1.234 have two readings. The currency is not compared.
- date (`"format": "date"`): by value. Day/month, month/day and, with a two-digit year, year first are all tried:
  25/12/2018 has one reading, 03/04/2018 and 25/12/18 have two.
- two values with several readings are the same only if they are the same under every convention (03/04/2018 and
  3-4-2018), never because one of the readings fits: nothing is guessed.
- other strings: letters and digits only, casefolded. Marks that change an amount or a date still count: 9.00 is not
  900, and 1/12/2018 is not 11/2/2018, though their digits are the same.
"""

import json
import re
import unicodedata
from datetime import date
from decimal import Decimal
from functools import lru_cache
from typing import Any

from invoice import kind

# Currencies by name and not "three capitals": INV-0042 is no amount, and 9.00 CR may be a credit.
_CODES = "USD|EUR|GBP|CHF|JPY|CNY|INR|MYR|SGD|IDR|THB|PHP|VND|KRW|HKD|TWD|AUD|NZD|CAD|MXN|BRL|ZAR|AED|TRY|SEK|NOK|DKK"
_CODES += "|PLN|CZK|HUF|RON|BGN|RM|R[sS]\\.?|kr\\.?|zł|Kč|Ft"
_CURRENCY = rf"(?:[A-Z]{{0,3}}[$€£¥₹₩₽₺₫฿₱₪]|{_CODES})"
_AMOUNT = re.compile(rf"(?P<a>[-−+]?)\s*{_CURRENCY}?\s*(?P<b>[-−+]?)\s*(?P<body>[\d.,'’ ]+?)\s*{_CURRENCY}?(?P<c>-?)")
_MONTH_NAMES = ("january", "february", "march", "april", "may", "june")
_MONTH_NAMES += ("july", "august", "september", "october", "november", "december")
_MONTHS = {name[:length]: number for number, name in enumerate(_MONTH_NAMES, start=1) for length in (3, len(name))}
_MONTHS["sept"] = 9
_TIME = re.compile(
    r"(?:(?<=\d)T|\s+)\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?\s*(?:[AP]\.?M\.?|Z|[+-]\d\d:?\d\d)?$", re.IGNORECASE
)


def is_absent(value: Any) -> bool:
    """null, an empty or blank string and an empty list say nothing; 0 and false say something."""
    return value is None or value == [] or (isinstance(value, str) and not value.strip())


@lru_cache(maxsize=100_000)
def amount_readings(text: str) -> dict[str, Decimal]:
    """The values of a written amount by convention, "point" or "comma" for the decimal mark; empty when it is none.

    The currency is not compared. Negative: a minus before or after, or brackets.
    """
    text = unicodedata.normalize("NFKC", text).strip()  # also full-width digits and no-break spaces
    brackets = re.fullmatch(r"\((.*)\)", text)
    match = _AMOUNT.fullmatch(brackets[1] if brackets else text)
    if not match:
        return {}
    signs = [sign for sign in match.group("a", "b", "c") if sign] + ["-"] * bool(brackets)
    if len(signs) > 1:
        return {}
    body = match["body"]
    if re.fullmatch(r"\d{1,3}([ '’]\d{3})+([.,]\d+)?", body):
        body = re.sub(r"[ '’]", "", body)
    readings = {}
    for name, point, group in (("point", r"\.", ","), ("comma", ",", r"\.")):
        # Groups of three, or India's two and then three. No group starts with 0: 0,125 has one reading.
        grouped = rf"(?:[1-9]\d{{0,2}}(?:{group}\d{{3}})+|[1-9]\d?(?:{group}\d{{2}})+{group}\d{{3}})(?:{point}\d+)?"
        if re.fullmatch(rf"\d+(?:{point}\d*)?|{point}\d+|{grouped}", body):
            value = Decimal(re.sub(group, "", body).replace(",", "."))
            readings[name] = -value if signs and signs[0] != "+" else value
    return readings


@lru_cache(maxsize=100_000)
def date_readings(text: str) -> dict[str, date]:
    """The days of a written date by convention (day, month or year first); empty when it is no date.

    A time of day is left out. Month names are English. Two-digit years: 69-99 are 1969-1999, the rest 2000-2068.
    """
    text = unicodedata.normalize("NFKC", text).strip(" \t\n()[].,")
    text = _TIME.sub("", text)
    if re.fullmatch(r"\d{8}", text):
        forms = {"ymd": (text[:4], text[4:6], text[6:]), "dmy": (text[4:], text[2:4], text[:2])}
        forms["mdy"] = (text[4:], text[:2], text[2:4])
    else:
        parts = re.fullmatch(
            r"(\d{1,4}|[A-Za-z]{3,9})(?:st|nd|rd|th)?[\s./,-]+(\d{1,2}|[A-Za-z]{3,9})(?:st|nd|rd|th)?[\s./,-]+(\d{1,4})",
            text,
        )
        if not parts:
            return {}
        a, b, c = (str(_MONTHS.get(part.lower(), part)) for part in parts.groups())
        named = [not part.isdigit() for part in parts.groups()]
        if any(not part.isdigit() for part in (a, b, c)):
            return {}
        if len(a) == 4:
            forms = {"ymd": (a, b, c)}
        elif named[0]:
            forms = {"mdy": (c, a, b)}
        elif named[1]:
            forms = {"dmy": (c, b, a)}
        else:
            forms = {"dmy": (c, b, a), "mdy": (c, a, b), "ymd": (a, b, c)}
    readings = {}
    for name, (year, month, day) in forms.items():
        if len(year) not in (2, 4) or len(day) > 2 or len(month) > 2:
            continue
        number = int(year) if len(year) == 4 else int(year) + (1900 if int(year) >= 69 else 2000)
        try:
            if 1900 <= number < 2100:
                readings[name] = date(number, int(month), int(day))
        except ValueError:  # no such day, so not this convention
            continue
    return readings


def same_reading(a: dict, b: dict) -> bool:
    """Whether both have one reading and it is the same, or they are the same under every convention."""
    values_a, values_b = set(a.values()), set(b.values())
    if len(values_a) == 1 and len(values_b) == 1:
        return values_a == values_b
    return bool(a) and a == b


@lru_cache(maxsize=100_000)
def text_key(text: str) -> str:
    """Letters and digits, casefolded. Combining marks stay: without them vowels are lost in many scripts."""
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return "".join(letter for letter in text if unicodedata.category(letter)[0] in "LNM")


def same_value(gold: Any, predicted: Any, field: dict) -> tuple[bool, bool]:
    """(exact, normalised) for two values that are not absent, of a plain field of the schema."""
    if isinstance(predicted, (dict, list)):
        return False, False
    if kind(field) == "boolean" or isinstance(gold, bool) or isinstance(predicted, bool):
        exact = type(gold) is type(predicted) and gold == predicted
        return exact, exact
    if kind(field) in ("number", "integer"):
        both_numbers = not isinstance(gold, str) and not isinstance(predicted, str)
        same = same_reading(_amounts(gold), _amounts(predicted))
        return both_numbers and same, same
    exact = isinstance(predicted, str) and gold == predicted
    # A number where text is asked is compared as written; it is a schema violation all the same.
    a, b = (value if isinstance(value, str) else json.dumps(value) for value in (gold, predicted))
    if exact or a == b:
        return exact, True
    if field.get("format") == "date":
        return False, same_reading(date_readings(a), date_readings(b))
    if text_key(a) != text_key(b) or not text_key(a):
        return False, False
    for readings in (amount_readings, date_readings):
        if readings(a) and readings(b) and not same_reading(readings(a), readings(b)):
            return False, False
    return False, True


def _amounts(value: Any) -> dict[str, Decimal]:
    if isinstance(value, str):
        return amount_readings(value)
    return dict.fromkeys(("point", "comma"), Decimal(repr(value)))
