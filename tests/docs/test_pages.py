"""README and docs/: links lead somewhere, every page is in the site's navigation, and what pages name is there."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from .links import anchor, anchors, broken, links

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("**/*.md"))
# They stand outside the site and may name any file of the repository.
OTHERS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "proto/README.md")]
PROSE = [*PAGES, *OTHERS]


class Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads mkdocs.yml, whose tags name functions of the site's own packages."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def pages_of(entries: list[Any]) -> Iterator[str]:
    """Yields the pages of a navigation, sections opened."""
    for entry in entries:
        for title, target in entry.items():
            assert title
            yield from [target] if isinstance(target, str) else pages_of(target)


def tracked() -> set[str]:
    """The names, without folders, of all files of the repository."""
    found = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    listed = found.stdout.splitlines() if found.returncode == 0 else [str(path) for path in ROOT.rglob("*.py")]
    return {line.rpartition("/")[2] for line in listed}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_of_the_site_lead_to_its_pages(page: Path) -> None:
    assert broken(page, DOCS) == []


@pytest.mark.parametrize("page", OTHERS, ids=name)
def test_links_lead_to_files_of_the_repository(page: Path) -> None:
    assert broken(page, ROOT) == []


def test_pages_have_links_at_all() -> None:
    assert {"docs/deployment.md", "CONTRIBUTING.md"} <= set(links(ROOT / "README.md"))


def test_every_page_stands_in_the_navigation_once() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
    assert sorted(pages_of(site["nav"])) == [page.relative_to(DOCS).as_posix() for page in PAGES]
    assert site["strict"] is True


@pytest.mark.parametrize("page", PROSE, ids=name)
def test_targets_of_make_that_are_named_are_there(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*(?: [a-z-]+)*):", makefile, re.MULTILINE))
    there = {target for line in targets for target in line.split()}
    assert set(re.findall(r"`make ([a-z][a-z-]*)", page.read_text(encoding="utf-8"))) - there == set()


@pytest.mark.parametrize("page", PROSE, ids=name)
def test_modules_that_are_named_are_there(page: Path) -> None:
    named = re.findall(r"`(?:[\w./-]+/)?(\w+\.py)`", page.read_text(encoding="utf-8"))
    assert set(named) - tracked() == set()


def test_the_readme_is_short_and_says_what_has_not_run() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 150
    assert "has not run on a GPU yet" in readme


def test_the_glossary_has_few_words_and_the_code_has_all_of_them() -> None:
    words = re.findall(r"^\| \*\*(\w+)\*\* \|", (DOCS / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert 0 < len(words) <= 15
    services = [path for root in ("proto", "frontend", "scheduler", "worker") for path in (ROOT / root).rglob("*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in services).lower()
    assert [word for word in words if not re.search(rf"(?<![a-z]){word}", code)] == []


# What is planted in the page a.md, beside b.md with a heading that is there twice, and what is found wrong.
PLANTED = [
    ("[b](b.md), [there](b.md#one-two-3-and-four_five) and [here](#a-page)", None),
    ("[elsewhere](https://example.com/c.md#d), <https://example.com/c.md>", None),
    ("`[code](c.md)` and ``[`more`](c.md)``", None),
    ("```md\n[fenced](c.md)\n```", None),
    ("<!-- [comment](c.md) -->", None),
    ("[c](c.md)", "a.md: c.md: is no file"),
    ("![picture](c.svg)", "a.md: c.svg: is no file"),
    ('[titled](c.md "C")', "a.md: c.md: is no file"),
    ("[over\ntwo lines](c.md)", "a.md: c.md: is no file"),
    ("[`code` inside](c.md)", "a.md: c.md: is no file"),
    ("| [in](b.md) | [a table](c.md) |", "a.md: c.md: is no file"),
    ("[out](../c.md)", "a.md: ../c.md: leads out"),
    ("[absolute](/b.md)", "a.md: /b.md: is absolute"),
    ("[nowhere](b.md#three)", "a.md: b.md#three: has no such heading"),
    ("[nowhere here](#one)", "a.md: #one: has no such heading"),
    ("[not a heading](b.md#not-a-heading)", "a.md: b.md#not-a-heading: has no such heading"),
    ("[which](b.md#twice)", "a.md: b.md#twice: has that heading twice"),
]


@pytest.mark.parametrize(("text", "fault"), PLANTED, ids=[text[:30] for text, _ in PLANTED])
def test_the_rules_find_planted_links(tmp_path: Path, text: str, fault: str | None) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (tmp_path / "c.md").write_text("outside")
    (docs / "a.md").write_text(f"# A page\n\n{text}\n")
    (docs / "b.md").write_text(
        "# One, two (`3`) & four_five!\n\n## Twice\n\n```\n# Not a heading\n```\n\n## Twice ##\n".replace(
            " & ", " and "
        )
    )
    assert broken(docs / "a.md", docs) == ([fault] if fault else [])


def test_anchors_are_those_of_headings_with_code_and_links(tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("# `octavo serve`: all [of it](b.md)\n#no heading\n## 2026-11-21, first figures\n")
    assert anchors(page) == ["octavo-serve-all-of-it", "2026-11-21-first-figures"]
    assert anchor("Figure 18 (a): attention & co.") == "figure-18-a-attention--co"
