"""Check the links of the built documentation: `python scripts/check_links.py site`.

Every internal link and anchor must exist, and no page may load anything from another site. External
links are listed and not fetched. Exit code 1 if a link is dead.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

IGNORED = ("mailto:", "data:", "javascript:")


class Page(HTMLParser):
    """Links of a page, files loaded by the page, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record one element."""
        attributes = {name: value or "" for name, value in attrs}
        self.anchors |= {attributes[name] for name in ("id", "name") if name in attributes}
        if tag == "a" and "href" in attributes:
            self.links.add(attributes["href"])
        elif tag == "link" and "href" in attributes:
            self.loaded.add(attributes["href"])
        elif "src" in attributes:
            self.loaded.add(attributes["src"])


def faults(site: Path) -> Iterator[str]:
    """Yield a sentence for each dead link and each file loaded from another site."""
    pages = {path.resolve(): Page(path.read_text("utf-8")) for path in _html(site)}
    for path, page in pages.items():
        where = path.relative_to(site.resolve())
        for url in sorted(page.links | page.loaded):
            if _is_elsewhere(url):
                if url in page.loaded:
                    yield f"{where}: loads {url}, which needs a network"
            elif not url.startswith(IGNORED):
                yield from (f"{where}: {url}: {fault}" for fault in _dead(url, path, pages))


def links_elsewhere(site: Path) -> list[str]:
    """Return the links to other sites."""
    pages = [Page(path.read_text("utf-8")) for path in _html(site)]
    return sorted({url for page in pages for url in page.links if _is_elsewhere(url)})


def _html(site: Path) -> list[Path]:
    # 404.html is served under every path, so its links start at the root.
    return sorted(path for path in site.rglob("*.html") if path.name != "404.html")


def _is_elsewhere(url: str) -> bool:
    return bool(urlsplit(url).netloc)


def _dead(url: str, path: Path, pages: dict[Path, Page]) -> Iterator[str]:
    parts = urlsplit(url)
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if target.is_dir():
        target = target / "index.html"
    anchor = unquote(parts.fragment)
    if not target.exists():
        yield "does not exist"
    elif anchor and target in pages and anchor not in pages[target].anchors:
        yield "has no such anchor"


def main(site: Path) -> int:
    """Print dead links and external links; return the exit code."""
    wrong = list(faults(site))
    for text in wrong:
        print(text, file=sys.stderr)
    outside = links_elsewhere(site)
    print(f"{len(outside)} links to other sites, not fetched:")
    for url in outside:
        print(f"  {url}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "site")))
