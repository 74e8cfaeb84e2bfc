"""Markdown for pages of the reference: tables, docstrings, links between entries."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from itertools import pairwise
from textwrap import dedent
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import ModuleType

NOTE = "<!-- Made from the code by `make reference`: edit the docstring, the help text or the table there. -->"
"""The first line of each page."""
_SECTION = re.compile(r"^((?:Args|Returns|Raises|Yields|Attributes|Note):|Examples?::?)$", re.MULTILINE)
_ENTRY = re.compile(r"^    (\*{0,2}\w[\w.]*)(?: \([^)]*\))?:\s*(.*?)(?=^    \S|\Z)", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_DOUBLE = re.compile(r"(?<!`)``(?!`)")
_MEMBER = re.compile(r"[A-Z]\w+\.\w+")
"""An attribute or method of a class."""
_WORD = re.compile(r"[a-z]\w*")
"""A name that other things may have as well, such as a key in JSON or an argument: ``device``."""
_NAME = re.compile(r"(?:\| |- )`([^`\n]+)`")
"""The code that a row of a table or an item of a list begins with."""
_OF_JSON = re.compile(r"#+ (?:.*\bJSON\b.*|The object `\w+`)\n?")
"""The heading of a section whose words in code are keys of JSON."""
_CODE = re.compile(r"(?<![\[`\\])`([^`\n]+)`(?![`\]])")


def page(title: str, introduction: str, *parts: str) -> str:
    """Return a page: its title, one paragraph about it, and its parts."""
    return "\n\n".join([NOTE, f"# {title}", introduction, *(part for part in parts if part)]).rstrip() + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table with a row for each of ``rows``, whose texts may have several lines."""
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines += [f"| {' | '.join(_cell(text) for text in row)} |" for row in rows]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def paragraphs(text: str) -> str:
    """Return the Markdown of a text with lines of any length: a line for each paragraph, examples after ``::`` as code."""
    text = _DOUBLE.sub("`", inspect.cleandoc(text))
    written: list[str] = []
    for block in _blocks(text):
        if block.startswith("    ") or (written and written[-1].endswith("::")):
            if written and written[-1].endswith("::"):
                written[-1] = written[-1].removesuffix("::").rstrip() + ":"
            written.append(_code(block))
        elif block.startswith(">>> "):
            written.append(f"```pycon\n{block}\n```")
        elif re.match(r"[-*|#]|\d+\. |```", block):
            written.append(block)
        else:
            head, indented = _with_code(block)
            written.append(" ".join(head.split()))
            if indented:
                written[-1] = written[-1].removesuffix("::").rstrip() + ":"
                written.append(_code(indented))
    return "\n\n".join(written)


def flat(text: str, none: str = "`null`") -> str:
    """Return the Markdown of a text in a single line. ``none`` stands for the word `None`."""
    return " ".join(paragraphs(text).replace("`None`", none).split())


def _blocks(text: str) -> list[str]:
    """Return the parts of a text between blank lines. Blank lines within code, which is indented, separate nothing."""
    blocks: list[str] = []
    gap = ""
    for part in re.split(r"(\n\s*\n(?=\S)|\n(?:[ ]*\n)+(?= ))", text):
        if not part.strip():
            gap = part
        elif blocks and blocks[-1].startswith("    ") and part.startswith("    "):
            blocks[-1] += gap + part
        else:
            blocks.append(part)
    return blocks


def _code(block: str) -> str:
    """Return a block of code: Python if it is that, TOML if it begins with the head of a table, else commands."""
    text = dedent(block)
    try:
        ast.parse(text)
    except SyntaxError:
        language = "toml" if text.startswith("[") else "sh"
    else:
        language = "python"
    return f"```{language}\n{text}\n```"


def _with_code(block: str) -> tuple[str, str]:
    """Return a paragraph and the code that stands directly below its ``::``."""
    head, colons, code = block.partition("::\n")
    return (f"{head}::", code) if colons and code.strip() else (block, "")


def docstring(text: str) -> str:
    """Return the Markdown of a docstring in Google's style: arguments and errors become lists, ``Example::`` becomes code."""
    text = inspect.cleandoc(text)
    parts = _SECTION.split(text)
    written = [paragraphs(parts[0])]
    for head, body in zip(parts[1::2], parts[2::2], strict=True):
        name = head.rstrip(":")
        if head.endswith("::"):
            written.append(f"```python\n{dedent(body.strip(chr(10))).rstrip()}\n```")
        elif name in ("Args", "Raises", "Attributes"):
            rows = [
                f"- `{entry[1]}`: {_cell(paragraphs(entry[2]))}"
                for entry in _ENTRY.finditer(f"{body.strip(chr(10))}\n")
            ]
            title = {"Args": "Arguments"}.get(name, name)
            written.append(f"**{title}**\n\n" + "\n".join(rows))
        elif name.startswith("Example"):
            written.append(f"**{name}**\n\n{paragraphs(dedent(body))}")
        else:
            written.append(f"**{name}**: {paragraphs(dedent(body).strip())}")
    return "\n\n".join(part for part in written if part)


def attribute_docstrings(owner: type | ModuleType) -> dict[str, str]:
    """Return the docstring below each attribute in the body of a class or module, by the attribute's name."""
    body = ast.parse(dedent(inspect.getsource(owner))).body
    if isinstance(owner, type):
        assert isinstance(body[0], ast.ClassDef)
        body = body[0].body
    texts = {}
    for statement, below in pairwise(body):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        text = below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else None
        if isinstance(text, str) and isinstance(targets[0], ast.Name):
            texts[targets[0].id] = text
    return texts


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-")


def entries(text: str) -> dict[str, str]:
    """Return the anchors of a page's entries by name: headings that are code."""
    headings = _HEADING.findall(_FENCE.sub("", text))
    return {heading.strip("`"): slug(heading) for heading in headings if re.fullmatch(r"`[^`]+`", heading)}


def with_links(texts: Mapping[str, str], ambiguous: Iterable[str] = ()) -> dict[str, str]:
    """Return the pages with links to the entries that they name in code, each once within an entry.

    A name with several meanings has no link, or only a link to an entry on the same page:

    - a name with entries on two pages, such as ``--store``, and a name in ``ambiguous``;
    - a word that begins a row or item of the page, which gives it a meaning of its own: ``ok`` on the page of a command;
    - a word in a section about JSON, which is a key there.
    """
    own = {name: {entry: f"{name}#{anchor}" for entry, anchor in entries(text).items()} for name, text in texts.items()}
    count = Counter([*(entry for places in own.values() for entry in places), *ambiguous])
    common = {entry: place for places in own.values() for entry, place in places.items() if count[entry] == 1}
    return {name: _linked(text, name, _without_own_words(common, text) | own[name]) for name, text in texts.items()}


def _without_own_words(places: Mapping[str, str], text: str) -> dict[str, str]:
    firsts = {first[1].partition("(")[0] for line in text.splitlines() if (first := _NAME.match(line))}
    return {name: place for name, place in places.items() if not (name in firsts and _WORD.fullmatch(name))}


def _linked(text: str, name: str, places: Mapping[str, str]) -> str:
    """Return a page with links from code to ``places``, which are pages and anchors by name."""
    written: list[str] = []
    linked: set[str] = set()

    def link(match: re.Match[str]) -> str:
        word = match[1]
        place = places.get(word) or (places.get(word.partition(".")[0]) if _MEMBER.fullmatch(word) else None)
        if place is None or word in linked or (is_json and _WORD.fullmatch(word)):
            return match[0]
        linked.add(word)
        return f"[`{word}`]({place.removeprefix(name) if place.startswith(f'{name}#') else place})"

    is_code = is_json = False
    for line in text.splitlines(keepends=True):
        is_fence = line.lstrip().startswith("```")
        is_code ^= is_fence
        if line.startswith("#") and not is_code:
            linked.clear()
            is_json = _OF_JSON.fullmatch(line) is not None
            linked.add(line.strip("# \n").strip("`"))
        is_prose = not (is_code or is_fence or line.startswith(("#", "<!--")))
        # The name of a row or an item is no word of a text.
        first = _NAME.match(line)
        head = first[0] if first else ""
        written.append(head + _CODE.sub(link, line[len(head) :]) if is_prose else line)
    return "".join(written)


def index(texts: Mapping[str, str]) -> str:
    """Return the page that lists all others, with the first sentence of each."""
    rows = []
    for name, text in texts.items():
        title = _HEADING.findall(text)[0]
        introduction = text.split(f"# {title}\n\n", 1)[1].partition("\n\n")[0]
        sentence = re.split(r"(?<=\.)\s", introduction, maxsplit=1)[0]
        rows.append(f"- [{title}]({name}): {sentence}")
    names = "\n".join(name.removesuffix(".md") for name in texts)
    contents = f"```{{toctree}}\n:hidden:\n\n{names}\n```"
    return page("Reference", "Each page is made from the code of this version.", "\n".join(rows), contents)
