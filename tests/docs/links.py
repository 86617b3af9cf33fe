"""Relative links and anchors of Markdown pages, by the rules that both a repository's reader and the site keep."""

import re
from collections.abc import Iterator
from pathlib import Path

_FENCE = re.compile(r"^(```+|~~~+).*?^\1[`~]*\s*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_HEADING = re.compile(r"^ {0,3}#{1,6} +(.+?)(?: +#+)? *$", re.MULTILINE)
_ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:|//", re.IGNORECASE)


def broken(page: Path, inside: Path) -> list[str]:
    """Returns what is wrong with the relative links of `page`, whose targets must lie in the folder `inside`."""
    return [f"{page.name}: {link}: {fault}" for link in links(page) if (fault := _fault(page, link, inside))]


def links(page: Path) -> Iterator[str]:
    """Yields the targets of the links and images of a page that name no other server."""
    text = _without_code(page.read_text(encoding="utf-8"))
    return (target for target in _LINK.findall(text) if not _ELSEWHERE.match(target))


def anchors(page: Path) -> list[str]:
    """Returns the anchor of each heading of a page, in order."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return [anchor(heading) for heading in _HEADING.findall(text)]


def anchor(heading: str) -> str:
    """Returns the anchor that a repository's reader and the site make of a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")


def _without_code(text: str) -> str:
    for pattern in (_FENCE, _COMMENT, _CODE):
        text = pattern.sub("", text)
    return text


def _fault(page: Path, link: str, inside: Path) -> str | None:
    path, _, fragment = link.partition("#")
    target = (page.parent / path).resolve() if path else page.resolve()
    if link.startswith("/"):
        return "is absolute"
    if not target.is_relative_to(inside.resolve()):
        return "leads out"
    if not target.exists():
        return "is no file"
    if not fragment:
        return None
    # A heading that is there twice has anchors that readers of repositories and the site number differently.
    match anchors(target).count(fragment) if target.suffix == ".md" else 0:
        case 0:
            return "has no such heading"
        case 1:
            return None
        case _:
            return "has that heading twice"
