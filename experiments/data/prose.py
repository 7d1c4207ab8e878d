"""The prose of HTML pages: paragraphs of running text, without menus, code, tables and lists of links."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

SHORTEST = 40  # characters of a paragraph: shorter ones are headings, labels and links
LETTERS = 0.75  # of a paragraph's characters are letters or spaces; of code and formulas fewer are
BLOCKS = frozenset({"p", "li", "dd", "blockquote"})
# What holds no running text, by element and by the classes that common generators of manuals give it.
DROPPED = "script|style|nav|header|footer|pre|table|form|figure|svg|math"
MENUS = "sphinxsidebar|related|navheader|navfooter|toctree-wrapper|toc|sidebar|headerlink|breadcrumbs|navigation|menu"
MAIN = "//main | //*[@role='main'] | //article"
_UNWANTED = " | ".join(
    [f"//{name}" for name in DROPPED.split("|")]
    + [f"//*[contains(concat(' ', @class, ' '), ' {name} ')]" for name in MENUS.split("|")]
)
_NEITHER_LETTER_NOR_SPACE = re.compile(r"[\W\d_]+")


def paragraphs(page: bytes) -> list[str]:
    """The paragraphs of one HTML page, in order, each on one line; of a page that is no HTML none.

    Of nested blocks the innermost count, so that a list of long entries is not one paragraph.
    """
    from lxml import etree, html

    try:
        page.decode("utf-8")
        encoding = "utf-8"
    except UnicodeDecodeError:
        encoding = "iso-8859-1"
    try:
        tree: Any = html.document_fromstring(page, parser=html.HTMLParser(encoding=encoding))
    except (etree.ParserError, etree.XMLSyntaxError):
        return []
    for element in tree.xpath(_UNWANTED):
        if element.getparent() is not None:
            element.drop_tree()
    inside = tree.xpath(MAIN)
    found = []
    for element in (inside[0] if inside else tree).iter(*BLOCKS):
        if next(element.iterdescendants(*BLOCKS), None) is None:
            text = " ".join(element.text_content().split())
            if is_prose(text):
                found.append(text)
    return found


def is_prose(paragraph: str) -> bool:
    """True if a paragraph is long enough and made of words rather than of code, numbers or signs."""
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return len(paragraph) >= SHORTEST and letters >= LETTERS * len(paragraph)


def without_repetitions(pages: Iterable[tuple[str, list[str]]], shortest: int) -> Iterator[tuple[str, str]]:
    """(Path, text) of each page, a paragraph a line, without paragraphs that an earlier one had.

    Two paragraphs are the same if their letters are: versions and dates of one notice differ in digits. Pages with less
    than ``shortest`` characters left are skipped.
    """
    seen: set[bytes] = set()
    for path, blocks in pages:
        new = []
        for block in blocks:
            letters = _NEITHER_LETTER_NOR_SPACE.sub("", block.lower())
            key = hashlib.blake2b(letters.encode("utf-8", "replace"), digest_size=12).digest()
            if key not in seen:
                seen.add(key)
                new.append(block)
        if sum(map(len, new)) >= shortest:
            yield path, "\n".join(new) + "\n"
