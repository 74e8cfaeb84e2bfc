"""The package that a file is of, among those that are installed."""

from __future__ import annotations

from pathlib import PurePath

import pytest

from pytest_gpumem.base.requirements.installed import by_module, installed_file


def install(folder, name, release, files, *, listed=True):
    """Write a distribution into a folder as an installer does, with or without the list of its files."""
    info = f"{name.replace('-', '_')}-{release}.dist-info"
    texts = {
        **dict.fromkeys(files, ""),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n",
    }
    if listed:
        texts[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in (*texts, f"{info}/RECORD"))
    for file, text in texts.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


@pytest.fixture
def installed(tmp_path):
    """A folder of packages: parts of two namespaces, and some that are called otherwise than their module."""
    folder = tmp_path / "site-packages"
    install(folder, "clouds-audio", "1.0", ["clouds/audio/__init__.py", "clouds/audio/waves.py"])
    install(folder, "clouds-video", "2.0", ["clouds/video/__init__.py", "clouds/video/frames.py"])
    # A part that is called as the namespace is.
    install(folder, "clouds", "3.0", ["clouds/core/__init__.py"])
    # Parts that share their folders, too.
    install(folder, "rocks-a", "1.1", ["rocks/all/a.py"])
    install(folder, "rocks-b", "1.2", ["rocks/all/b.py", "rocks/all/deep/b.py"])
    install(folder, "PyMarkup", "6.0", ["markup/__init__.py", "_markup.py"])
    install(folder, "unlisted", "0.1", ["unlisted/__init__.py"], listed=False)
    return folder


@pytest.mark.parametrize(
    ("file", "package"),
    [
        ("clouds/audio/waves.py", ("clouds-audio", "1.0")),
        ("clouds/video/frames.py", ("clouds-video", "2.0")),
        ("clouds/core/__init__.py", ("clouds", "3.0")),
        # Made after the installation: the folder tells.
        ("clouds/video/generated/code.py", ("clouds-video", "2.0")),
        ("rocks/all/a.py", ("rocks-a", "1.1")),
        ("rocks/all/b.py", ("rocks-b", "1.2")),
        ("rocks/all/deep/other.py", ("rocks-b", "1.2")),
        ("markup/other.py", ("PyMarkup", "6.0")),
        ("_markup.py", ("PyMarkup", "6.0")),
        ("unlisted/deep/code.py", ("unlisted", "0.1")),
        ("nobodys/code.py", None),
    ],
)
def test_a_file_is_of_the_package_that_lists_it(installed, file, package):
    found = installed_file(PurePath(installed, file))
    assert found is not None
    assert found.package == package


def test_a_line_of_a_part_of_a_namespace_names_its_release(installed):
    found = installed_file(PurePath(installed, "clouds/video/frames.py"))
    assert found is not None
    assert found.shown == "clouds-video 2.0: clouds/video/frames.py"


def test_modules_are_the_first_names_of_what_is_installed(installed):
    assert {"clouds", "rocks", "markup", "_markup"} <= by_module(str(installed)).keys()
