"""SVG as text: elements whose words are escaped, and the lengths of those words."""

from __future__ import annotations

import math
from collections.abc import Iterable

from markupsafe import Markup, escape

Part = str | Markup
"""What an element holds: Markup stands as it is, other text is escaped."""

_WIDE = 0.6
"""About how wide a character is, in font sizes; sans-serif fonts differ, so this is generous."""


def shown(text: str) -> str:
    r"""`text` with characters that a page would not show, or act on, in their escaped form.

    >>> print(shown("a\x1b[31m"))
    a\x1b[31m
    """
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def element(name: str, *parts: Part, **attributes: str | float | None) -> Markup:
    """One element; `class_` is its class, `_` in other names is `-`, None leaves one out.

    >>> print(element("text", "a < b", x=1.26, class_="note"))
    <text x="1.3" class="note">a &lt; b</text>
    """
    listed = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = join(part if isinstance(part, Markup) else escape(shown(part)) for part in parts)
    return Markup(f"<{name}{listed}>{inner}</{name}>" if parts else f"<{name}{listed}/>")


def _value(value: str | float) -> str:
    if isinstance(value, str):
        return str(escape(shown(value)))
    return f"{round(value, 1):g}"


def join(parts: Iterable[Markup]) -> Markup:
    """All of these, one after the other."""
    return Markup("").join(parts)


def figure(
    *parts: Markup, name: str, title: str, description: str, width: float, height: float
) -> Markup:
    """A drawing with its text alternative; `name` is its id in the page, sizes in pixels.

    It shrinks with the page to two thirds at most, so that words stay legible; then it scrolls.
    """
    least = min(width, max(320, width * 2 / 3))
    return element(
        "svg",
        *_alternative(name, title, description),
        *parts,
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        style=f"max-width:{width:.0f}px;min-width:{least:.0f}px",
        **_role(name),
    )


def stretched_figure(
    *parts: Markup, name: str, title: str, description: str, width: float, height: float
) -> Markup:
    """As `figure`, for parts whose x are percentages: it is `width` wide at most."""
    return element(
        "svg",
        *_alternative(name, title, description),
        *parts,
        style=f"max-width:{width:.0f}px;height:{height:.0f}px",
        **_role(name),
    )


def _alternative(name: str, title: str, description: str) -> tuple[Markup, Markup]:
    return (
        element("title", title, id=f"{name}-title"),
        element("desc", description, id=f"{name}-desc"),
    )


def _role(name: str) -> dict[str, str]:
    return {"role": "img", "aria_labelledby": f"{name}-title {name}-desc"}


def text_width(text: str, size: float) -> float:
    """About how many pixels `text` takes at this font size."""
    return len(shown(text)) * size * _WIDE


def fitted(text: str, width: float, size: float) -> str:
    """`text`, cut with an ellipsis to fit into `width` pixels.

    >>> fitted("0000:03:00.0", 60, 10)
    '0000:03:0…'
    """
    text = shown(text)
    fits = max(1, int(width / (size * _WIDE)))
    return text if len(text) <= fits else text[: fits - 1] + "…"


# Scales that begin at 0: round marks along them, and colours.


_VIRIDIS = (
    *((68, 1, 84), (72, 36, 117), (65, 68, 135), (53, 95, 141), (42, 120, 142), (33, 145, 140)),
    *((34, 168, 132), (68, 191, 112), (122, 209, 81), (189, 223, 38), (253, 231, 37)),
)
"""matplotlib's viridis at eleven places: even in lightness, and told apart by everybody."""


def viridis(share: float) -> tuple[int, int, int]:
    """The colour at `share` of the scale, 0 to 1.

    >>> viridis(0.05)
    (70, 18, 100)
    """
    place = max(0.0, min(1.0, share)) * (len(_VIRIDIS) - 1)
    low = min(int(place), len(_VIRIDIS) - 2)
    part = place - low
    first, second = _VIRIDIS[low], _VIRIDIS[low + 1]
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(first, second, strict=True))
    return red, green, blue


def steps(largest: float, count: int = 5) -> list[float]:
    """Round marks of an axis from 0 up to at least `largest`, about `count` of them.

    >>> steps(50.65)
    [0.0, 20.0, 40.0, 60.0]
    """
    if largest <= 0:
        return [0.0, 1.0]
    rough = largest / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * n for n in (1, 2, 5, 10) if unit * n >= rough * 0.999)
    return [step * n for n in range(math.ceil(largest / step - 1e-9) + 1)]
