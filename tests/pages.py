"""The pages of the docs, their headings and fenced blocks, and the commands in these."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SITE = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
"""The pages that the site is made of."""
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *SITE]
FENCE = re.compile(
    r"^(?:\*\*`(?P<file>[^`\n]+)`\*\*:?\n\n?)?"
    r"```(?P<language>[\w{}]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
"""A fenced block of code, with the line above it that names its file: bold code, such as ``**`model.py`**``."""
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
SHELL = ("sh", "console")
"""Languages of blocks of commands; in ``console`` they have a prompt, and what they print stands below them."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, and the heading that it stands under."""

    page: str
    section: str
    language: str
    file: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.section}"

    @property
    def commands(self) -> list[str]:
        """The commands of a block of commands, without their comments."""
        lines = self.text.splitlines()
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        return [re.sub(r" {2,}#.*", "", line) for line in lines if line]

    @property
    def printed(self) -> list[str]:
        """The lines that are output."""
        return [line for line in self.text.splitlines() if not (self.language == "console" and line.startswith("$ "))]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks_of(page: str) -> list[Block]:
    text, found = read(page), []
    for match in FENCE.finditer(text):
        section = HEADING.findall(FENCE.sub("", text[: match.start()]))[-1]
        found.append(Block(page, section, match["language"], match["file"], match["text"]))
    return found


def blocks(*languages: str) -> list[Block]:
    """The blocks of all pages that are in one of these languages."""
    return [block for page in PAGES for block in blocks_of(page) if block.language in languages]


def workflows() -> list[tuple[Block, str]]:
    """The blocks with a workflow of GitHub, or a part of one, and the text of the whole workflow."""
    others = (".gitlab-ci.yml", ".buildkite/", "azure-pipelines.yml", ".circleci/", ".github/dependabot.yml")
    return [(block, whole_workflow(block)) for block in blocks("yaml") if not (block.file or "").startswith(others)]


def whole_workflow(block: Block) -> str:
    """The workflow that a block is a part of: its jobs, a job or a few of its steps, with the least that is around them."""
    text = block.text
    if re.search(r"^on:", text, flags=re.MULTILINE):
        return text
    around = "name: part\non: push\npermissions: {contents: read}\n"
    if text.startswith("jobs:"):
        return f"{around}{text}"
    if "steps:" in text:
        return f"{around}jobs:\n  it:\n    timeout-minutes: 5\n{text}"
    steps = re.sub(r"^", "      ", re.sub(r"^      ", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
    return f"{around}jobs:\n  it:\n    runs-on: ubuntu-latest\n    steps:\n{steps}\n"


COMPARED: set[Block] = set()
"""The blocks of output that tests compare with that of a run: `output` notes them as the files of tests are imported."""


def output(page: str, first: str) -> Block:
    """The block of output with a line that begins so, which whoever asks for it compares with the output of a run."""
    (found,) = (
        one
        for one in blocks_of(page)
        if one.language in ("text", "diff", "console") and f"\n{first}" in f"\n{one.text}"
    )
    COMPARED.add(found)
    return found


RUN: set[tuple[str, str]] = set()
"""The commands of pages that tests run, with their pages: `command` notes them as the files of tests are imported."""


def command(page: str, beginning: str) -> str:
    """The command of a page that begins so, which whoever asks for it runs."""
    (found,) = {
        line for one in blocks_of(page) if one.language in SHELL for line in one.commands if line.startswith(beginning)
    }
    RUN.add((page, found))
    return found


VARIES = {
    r"\d{4}-\d\d-\d\d": "DATE",
    r"\b(?=[0-9a-f]*\d)[0-9a-f]{9}\b": "COMMIT",
    r"(?<=cpu-)[0-9a-f]{6}\b": "ENVIRONMENT",
    r"\d+\.\d+ [mµ]?s\b": "TIME",
    r"\d+ samples/s": "THROUGHPUT",
    r"; 1 time will not be compared with: .*": "",
    r" +": " ",
}
"""What is another in each run or on each machine, and the columns that are as wide as their times."""


def lasting(text: str) -> list[str]:
    """The lines of a text without what varies."""
    for pattern, word in VARIES.items():
        text = re.sub(pattern, word, text)
    return [line.strip() for line in text.strip().splitlines()]


def follows(block: Block, lines: list[str]) -> bool:
    """Whether the lines of a block stand in an output in their order, one after the other, but where it has an ellipsis."""
    parts = [lasting(part) for part in re.split(r"^\.\.\.$", "\n".join(block.printed), flags=re.MULTILINE)]
    said = lasting("\n".join(lines))
    begin = 0
    for part in parts:
        found = (at for at in range(begin, len(said)) if said[at : at + len(part)] == part)
        at = next(found, None)
        if at is None:
            return False
        begin = at + len(part)
    return True
