"""Write figures as scalars for TensorBoard, which shows a run for each device, and a chart for each metric and test.

Each session adds a point to each chart. The scalars are written by ``torch.utils.tensorboard``, which stores tags unchanged and
values in double precision: see https://docs.pytorch.org/docs/stable/tensorboard.html. tensorboardX is not used, because it
replaces characters in tags and stores values with 24 bits, too few for bytes.
"""

from __future__ import annotations

import datetime
import functools
import re
from typing import TYPE_CHECKING

from pytest_gpumem.base.errors import ExportError, GitError
from pytest_gpumem.base.git import git, is_shallow
from pytest_gpumem.base.open_folder import open_folder
from pytest_gpumem.reporting.exports.figures import utf8

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pytest_gpumem.reporting.exports.figures import Figure

_SAFE_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HASH = re.compile(r"[0-9a-f]{4,64}")


def tag(figure: Figure) -> str:
    """Return a figure's tag in TensorBoard: ``"peak_allocated/tests/test_gpt.py::test_train[fp32] (train_step)"``.

    The tag begins with the metric, because TensorBoard groups charts by the text before the first ``/``.
    """
    return utf8(f"{figure.metric}/{figure.test} ({figure.measurement})")


def seconds(figure: Figure) -> int:
    """Return the time at which the figure's session ended, in seconds since 1970.

    Raises:
        ExportError: The time in the report is invalid.
    """
    try:
        ended = datetime.datetime.strptime(figure.ended, "%Y-%m-%dT%H:%M:%S%z")
    except ValueError:
        raise ExportError(f"a report ended at {figure.ended!r}, expected a time like '2026-11-21T16:20:05Z'") from None
    return int(ended.timestamp())


def commits(folder: Path) -> Callable[[Figure], int]:
    """Return a function that counts the commits up to a figure's commit, in the git repository around ``folder``.

    The returned function raises `ExportError` if git cannot count the commits, for example in a shallow clone.
    """

    def count(figure: Figure) -> int:
        if figure.commit is None:
            raise ExportError(
                f"the report that ended at {figure.ended} does not name a commit: use --step=time instead"
            )
        return _commits_to(figure.commit, folder)

    return count


def write_scalars(figures: Sequence[Figure], folder: Path, step_of: Callable[[Figure], int]) -> None:
    """Write an event file for each device, into a subfolder that TensorBoard shows as a run.

    Each figure becomes a scalar ``<metric>/<test> (<measurement>)`` in double precision. The session's end becomes the
    scalar's wall time. Writing needs TensorBoard (``pip install tensorboard``).

    Args:
        figures: The figures to write.
        folder: The folder that gets a subfolder for each device.
        step_of: Returns a figure's position on the horizontal axis, for example a number of commits.

    Raises:
        ExportError: A figure cannot be written, or TensorBoard is missing.
        OSError: The folder cannot be written.
    """
    steps = [(figure, step_of(figure), seconds(figure)) for figure in figures]
    for figure in figures:
        if _SAFE_FOLDER.fullmatch(figure.environment.slug) is None:
            raise ExportError(
                f"{figure.test} was measured on the device {figure.environment.slug!r}, which cannot be a folder's name"
            )
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ExportError(f"TensorBoard's event files cannot be written ({error}): pip install tensorboard") from None
    for slug in sorted({figure.environment.slug for figure in figures}):
        with open_folder(folder, [slug], make=True) as run:
            writer = SummaryWriter(str(run.path))
        try:
            for figure, step, ended in steps:
                if figure.environment.slug == slug:
                    writer.add_scalar(tag(figure), figure.value, step, ended, new_style=True, double_precision=True)
        finally:
            writer.close()


@functools.cache
def _commits_to(commit: str, folder: Path) -> int:
    # Check the commit's hash, because git would read a text such as "--output=file" from a report as an option.
    if _HASH.fullmatch(commit) is None:
        raise ExportError(f"a report names the commit {commit!r}, which is not a hash")
    try:
        if is_shallow(folder):
            raise ExportError(
                "commits cannot be counted in a shallow clone: fetch the missing commits with git fetch --unshallow"
            )
        return int(git(folder, "rev-list", "--count", f"{commit}^{{commit}}", "--"))
    except GitError as error:
        raise ExportError(f"the commits up to {commit} cannot be counted: {error}") from None
