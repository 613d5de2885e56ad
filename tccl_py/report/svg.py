"""SVG as text: elements whose words are escaped, and the lengths of those words."""

from __future__ import annotations

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
