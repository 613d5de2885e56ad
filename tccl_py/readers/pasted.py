"""Text as people paste it -> plain lines: one normalizer before all readers of text."""

from __future__ import annotations

import re

_ESCAPES = re.compile("\x1b\\[[0-9;?]*[A-Za-z]|(?:\u241b|\\^\\[)?\\[\\d{1,2}(?:;\\d{1,3}){0,4}m")
"""Colours, also where a web page dropped or replaced the escape byte."""
_INVISIBLE = dict.fromkeys([*range(0x200B, 0x2010), 0x2060, 0xFEFF, 0x1B])
_SPACES = dict.fromkeys([0xA0, 0x2007, 0x202F, 0x3000], " ")
_QUOTE = re.compile(r"^[ \t]{0,8}(?:>[ \t]?)+|^[ \t]*(?:```|~~~).*$", re.MULTILINE)


def plain(text: str) -> str:
    r"""Return a text without colours, invisible characters, quotes and fences; lines stay.

    >>> plain("\ufeff> [4mGPU0\xa0GPU1[0m\n```")
    'GPU0 GPU1\n'
    """
    text = _ESCAPES.sub("", text.translate({**_INVISIBLE, 0x1B: "\x1b"}))
    return _QUOTE.sub("", text.translate(_SPACES | _INVISIBLE))
