"""Follows every link of the site that stays within it, and refuses what a reader without a network would miss.

python scripts/check_site.py build/site      # `make docs` does
"""

from __future__ import annotations

import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """What a page links to, what it loads, and the places in it that can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places = {"", "top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value is not None}
        self.places |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag in ("img", "script", "source", "iframe") and "src" in found:
            self.loaded.append(found["src"])
        elif tag == "link" and "href" in found and found.get("rel") not in ("canonical", "alternate"):
            self.loaded.append(found["href"])


@cache
def page_at(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def faults_of(path: Path) -> list[str]:
    """What is wrong with the links of one page."""
    page = page_at(path)
    remote = (target for target in page.loaded if urlsplit(target).netloc)
    faults = [f"loads {target} from the network" for target in remote]
    for target in (*page.links, *page.loaded):
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            continue
        to = (path.parent / unquote(parts.path)) if parts.path else path
        if not to.exists():
            faults.append(f"links to {target}, which is not there")
        elif to.suffix == ".html" and unquote(parts.fragment) not in page_at(to.resolve()).places:
            faults.append(f"links to {target}, where there is no such place")
    return faults


def main(site: Path) -> int:
    pages = sorted(site.resolve().rglob("*.html"))
    faults = [f"{page.relative_to(site.resolve())} {fault}" for page in pages for fault in faults_of(page)]
    print("\n".join(faults) if faults else f"{len(pages)} pages, every link within the site leads somewhere")
    return bool(faults) or not pages


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
