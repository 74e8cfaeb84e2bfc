"""Names of variants in reports."""

from __future__ import annotations

import pytest

from pytest_gpumem.base.requirements.requirement_set import RequirementSet
from pytest_gpumem.tools.ab.variants import Variant, without_folders


@pytest.mark.parametrize(
    ("base", "head", "expected"),
    [
        ("/home/ada/old/gpt", "/home/ada/new/gpt", ["old/gpt", "new/gpt"]),
        ("/home/ada/gpt-1.0", "/home/ada/gpt-1.1", ["gpt-1.0", "gpt-1.1"]),
        ("-r /srv/old.txt", "-r /srv/new.txt", ["-r old.txt", "-r new.txt"]),
        ("/srv/gpt, /srv/helper", "/srv/gpt, einops==0.8", ["gpt, helper", "gpt, einops==0.8"]),
        ("gpt @ file:///srv/gpt-1.0.whl", "gpt[extra]==1.1", ["gpt @ gpt-1.0.whl", "gpt[extra]==1.1"]),
        ("gpt @ git+file:///srv/gpt@v1", "gpt @ git+https://example.org/a/gpt@v2", ["gpt @ gpt@v1", None]),
        ("../old", "./new/gpt", ["../old", "./new/gpt"]),
        ("/srv/gpt", "/gpt", ["srv/gpt", "/gpt"]),
    ],
)
def test_an_absolute_path_in_a_name_is_as_short_as_tells_it_from_the_others(base, head, expected):
    shown = [str(one) for one in without_folders([Variant(None, RequirementSet(name=name)) for name in (base, head)])]
    assert shown == [expected[0], expected[1] or head]


def test_an_interpreter_of_another_folder_is_told_by_its_name():
    one = Variant(None, RequirementSet(name="gpt==1.0", python="/opt/python/bin/python3.12"))
    assert [str(shown) for shown in without_folders([one])] == ["gpt==1.0 on python3.12"]
    assert str(one) == "gpt==1.0 on /opt/python/bin/python3.12"
