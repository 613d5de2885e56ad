"""Numbers as C's strtol and strtof read them from the start of a text."""

from __future__ import annotations

import re

_BLANKS = r"[ \t\n\v\f\r]*"
_DIGITS = {
    0: re.compile(_BLANKS + r"([+-]?(?:0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*))"),
    16: re.compile(_BLANKS + r"([+-]?(?:0[xX])?[0-9a-fA-F]+)"),
}
_MOST_DIGITS = 400
"""More than a value of a graph file has, with its leading zeros; Python refuses from 640 on."""
_FLOAT = re.compile(
    _BLANKS + r"([+-]?(?:(?P<hex>0x(?:[0-9a-f]+\.?[0-9a-f]*|\.[0-9a-f]+)(?:p[+-]?[0-9]+)?)"
    r"|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|inf|nan))",
    re.IGNORECASE | re.ASCII,
)


def c_integer(text: str, base: int = 0) -> tuple[int, str]:
    """Return the integer at the start of a text, and the rest; 0 and the whole text without digits.

    The base is 16, or 0 for a base by prefix. Integers far beyond 64 bits are cut.

    >>> c_integer("0x10 channels"), c_integer("010"), c_integer("no"), c_integer("1f", 16)
    ((16, ' channels'), (8, ''), (0, 'no'), (31, ''))
    """
    match = _DIGITS[base].match(text)
    if match is None:
        return 0, text
    digits = match[1][:_MOST_DIGITS]
    octal = base == 0 and re.fullmatch("[+-]?0[0-7]+", digits)
    return int(digits, 8 if octal else base), text[match.end() :]


def c_float(text: str) -> float:
    """Return the floating-point number at the start of a text, 0.0 if there is none.

    >>> c_float("12.5 GB/s"), c_float("fast"), c_float("0x10"), c_float("1e999")
    (12.5, 0.0, 16.0, inf)
    """
    match = _FLOAT.match(text)
    if match is None:
        return 0.0
    try:
        return float.fromhex(match[1]) if match["hex"] else float(match[1])
    except OverflowError:
        return float("inf")
