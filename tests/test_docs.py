"""The documents: whatever they point at is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """A heading's anchor is its words in lower case, joined by hyphens (GitHub's rule)."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    for link in LINK.findall(FENCE.sub("", document.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), f"{document.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{document.name}: {link}"


def test_every_page_of_docs_is_found_from_the_readme() -> None:
    """Nothing in docs/ is a page that only its author knows."""
    readme = (ROOT / "README.md").read_text()
    assert [path.name for path in ROOT.glob("docs/*") if f"docs/{path.name}" not in readme] == []


def test_every_bench_that_is_named_exists() -> None:
    for document in DOCUMENTS:
        for name in re.findall(r"\bbench/\w+\.py", document.read_text()):
            assert (ROOT / name).exists(), f"{document.name}: {name}"
