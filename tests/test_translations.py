"""The Chinese pages keep step with the English ones: the same headings, commands, code and links."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRANSLATIONS = sorted([*ROOT.glob("*.zh.md"), *ROOT.glob("docs/*.zh.md")])
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"\s*#.*")
LINK = re.compile(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"")


def outline(page: Path) -> dict[str, object]:
    """What a translation does not change: heading levels, code without its comments, inline code, targets of links."""
    text = page.read_text(encoding="utf-8")
    prose = FENCE.sub("", text)
    targets = {(first or second).replace(".zh.md", ".md") for first, second in LINK.findall(prose)}
    return {
        "headings": re.findall(r"^(#+) ", prose, re.MULTILINE),
        "code": [[COMMENT.sub("", line).rstrip() for line in block.splitlines()] for block in FENCE.findall(text)],
        "words": sorted(set(re.findall(r"`([^`\n]+)`", prose))),
        "links": sorted(target.split("#")[0] for target in targets if not target.endswith(f"{original(page).name}")),
    }


def original(page: Path) -> Path:
    return page.with_name(page.name.replace(".zh.md", ".md"))


@pytest.mark.parametrize("page", TRANSLATIONS, ids=lambda page: page.name)
@pytest.mark.parametrize("part", ["headings", "code", "words", "links"])
def test_a_translation_keeps_step(page, part):
    assert outline(page)[part] == outline(original(page))[part]


def test_there_are_translations():
    assert ROOT / "README.zh.md" in TRANSLATIONS and ROOT / "docs" / "tutorial.zh.md" in TRANSLATIONS
