"""A hook of mkdocs: the links of the pages work in the site as they do in the repository.

A page may link to any file of the repository. The site gets every file that is linked: Markdown as it is, code and
folders of code as pages, all else unchanged. A fence such as ```python examples/credit/my_rule.py gets its path as a
title.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LANGUAGES = {".py": "python", ".yaml": "yaml", ".jinja": "jinja"}  # files that are shown as pages
LINK = re.compile(r"(?<=\]\()(?!\w+:|[#/])[^)#\s]+")
FENCE = re.compile(r"^(```\w+) ([^\s=]+)$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add what the pages link to, and what the Markdown among it links to."""
    pages = [Path(file.abs_src_path) for file in files.documentation_pages()]
    for page in pages:
        for target in (page.parent / link for link in LINK.findall(page.read_text(encoding="utf-8"))):
            if target.exists() and files.get_file_from_path(site_uri(target)) is None:
                files.append(make_file(target.resolve(), config))
                pages += [target.resolve()] if target.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the links of a page that is a file of the repository."""
    if page.file.abs_src_path is None:
        return markdown
    folder, here = Path(page.file.abs_src_path).parent, os.path.dirname(page.file.src_uri)

    def rewrite(link: re.Match[str]) -> str:
        target = folder / link[0]
        return os.path.relpath(site_uri(target), here or ".") if target.exists() else link[0]

    return FENCE.sub(r'\1 title="\2"', LINK.sub(rewrite, markdown))


def site_uri(target: Path) -> str:
    """Where the site has a file or folder of the repository."""
    target = target.resolve()
    uri = target.relative_to(DOCS if target.is_relative_to(DOCS) else ROOT).as_posix()
    return f"{uri}.md" if target.is_dir() or target.suffix in LANGUAGES else uri


def make_file(target: Path, config: Any) -> File:
    uri, name = site_uri(target), target.relative_to(ROOT).as_posix()
    if target.is_dir():
        listed = sorted(file for file in target.iterdir() if file.suffix in LANGUAGES)
        parts = [f"# {name}", *(f"## {file.name}\n\n{quote(file)}" for file in listed)]
    elif target.suffix in LANGUAGES:
        parts = [f"# {name}", quote(target)]
    else:
        return File.generated(config, uri, abs_src_path=str(target), inclusion=InclusionLevel.NOT_IN_NAV)
    text = "\n\n".join(["---\nsearch: {exclude: true}\n---", *parts])
    return File.generated(config, uri, content=text, inclusion=InclusionLevel.NOT_IN_NAV)


def quote(file: Path) -> str:
    return f"````{LANGUAGES[file.suffix]}\n{file.read_text(encoding='utf-8')}````"
