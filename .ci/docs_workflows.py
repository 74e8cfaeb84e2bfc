"""Write each workflow in the documentation into a folder, so linters can check them."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.pages import workflows

folder = Path(sys.argv[1])
shutil.rmtree(folder, ignore_errors=True)
folder.mkdir(parents=True)
for number, (block, text) in enumerate(workflows()):
    name = re.sub(r"\W+", "-", f"{block.page} {block.file or block.section}").strip("-")
    (folder / f"{number:02}-{name}.yml").write_text(text, encoding="utf-8")
