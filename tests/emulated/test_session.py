"""Sessions of pytest on an emulated GPU: gated, explained, in workers, and never taken for a measurement."""

from __future__ import annotations

import json
import re

import pytest

MODEL = """
import os
import torch
from torch import nn

HELD, PLANTED = [], os.environ.get("PLANTED", "")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(256, 768)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if "scores" in PLANTED:
            return ((q @ k.transpose(1, 2) / 16).softmax(-1)) @ v
        if "leak" in PLANTED:
            HELD.append(q)
        return nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]


def make():
    return nn.Sequential(*(Attention() for _ in range(4)))


def batch():
    return torch.randn(8, 512, 256)


def loss(out, _):
    return out.square().mean()


def test_train(gpumem):
    gpumem.train_step(make, batch, loss=loss)


def test_reads(gpumem):
    def step():
        x = torch.randn(2000, 2000, device="cuda")
        return x[x > 0] if "read" in PLANTED else x * 2

    gpumem.measure(step)


def test_asserts():
    raise AssertionError("not measured")
"""


@pytest.fixture
def session(processes, tmp_path):
    (tmp_path / "test_it.py").write_text(MODEL, encoding="utf-8")
    return processes.pytest


@pytest.mark.parametrize(
    "workers", [pytest.param((), id="alone"), pytest.param(("-n", "2"), id="workers", marks=pytest.mark.thorough)]
)
def test_what_is_planted_is_red_and_told_and_what_is_not_is_green(session, tmp_path, workers):
    recorded = session("--gpumem-update=new", *workers, new=True)
    assert recorded.returncode == 0, recorded.stdout
    store = tmp_path / "gpumem-baselines"
    assert [path.name for path in store.iterdir() if path.is_dir()] == ["emulated-h100-80gb"]
    clean = session("--gpumem-baseline", "--gpumem-report=report.json", "--gpumem-report=report.html", *workers)
    assert clean.returncode == 0, clean.stdout
    assert "gpumem: emulated:h100: bytes are those of torch's own allocator" in clean.stdout
    assert "gpumem: 2 gated" in clean.stdout
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert "(emulated)" in json.dumps(report)
    assert "(emulated)" in (tmp_path / "report.html").read_text(encoding="utf-8")

    red = session("--gpumem-baseline", *workers, PLANTED="scores read")
    assert red.returncode == 1
    assert "Emulated GPU memory regressed: peak " in red.stdout
    assert "4 x float32[8, 512, 512]" in red.stdout
    assert "test_it.py:17" in red.stdout
    assert "a boolean index reads values that an emulated GPU does not compute, at " in red.stdout
    assert "test_it.py:42" in red.stdout

    leak = session("--gpumem-baseline", *workers, PLANTED="leak")
    assert leak.returncode == 1
    assert "growth per step" in leak.stdout


def test_figures_are_held_against_a_real_gpus_baselines_where_these_are_named(session, tmp_path):
    assert session("--gpumem-update=new").returncode == 0
    emulated, real = (tmp_path / "gpumem-baselines" / slug for slug in ("emulated-h100-80gb", "nvidia-h100-80gb-hbm3"))
    emulated.rename(real)
    for path in real.rglob("*.toml"):
        text = path.read_text(encoding="utf-8").replace("emulated-h100-80gb", real.name).replace(" (emulated)", "")
        path.write_text(text, encoding="utf-8")
    against = ("--gpumem-baseline", f"--gpumem-against={real.name}")
    alone = session("--gpumem-baseline")
    assert "2 foreign (NVIDIA H100 80GB HBM3)" in alone.stdout
    clean = session(*against)
    assert (clean.returncode, "gpumem: 2 gated" in clean.stdout) == (0, True), clean.stdout
    scores = session(*against, PLANTED="scores")
    assert scores.returncode == 1
    assert "baseline: " in scores.stdout
    assert "NVIDIA H100 80GB HBM3, torch" in scores.stdout
    assert "--gpumem-update=all --gpumem-device=cuda" in scores.stdout
    nowhere = session("--gpumem-baseline", "--gpumem-against=nvidia-h10")
    assert nowhere.returncode == 4
    assert "--gpumem-against=nvidia-h10: the store has no baseline for that device" in nowhere.stderr
    assert [path.name for path in real.parent.iterdir() if path.is_dir()] == [real.name]


def test_tests_that_are_not_measured_are_deselected_and_times_are_not_taken(session):
    done = session("-rA")
    assert done.returncode == 0
    assert "2 passed, 1 deselected" in done.stdout
    assert "step time" not in done.stdout


def test_a_test_that_lost_its_fixture_is_not_deselected_but_missing(session, tmp_path):
    assert session("--gpumem-update=new", "-k", "reads").returncode == 0
    source = MODEL.replace("def test_reads(gpumem):", "def test_reads():").replace("gpumem.measure(step)", "step()")
    (tmp_path / "test_it.py").write_text(source, encoding="utf-8")
    done = session("--gpumem-baseline", "-k", "not train")
    assert done.returncode == 1
    assert "accept:   gpumem prune test_it.py::test_reads --gpumem-device=emulated:h100" in done.stdout
    assert "gpumem: 0 gated, 1 missing" in done.stdout
    assert "1 failed, 2 deselected" in done.stdout


SHARED = """
import pytest
import torch


@pytest.fixture(scope="module")
def positive():
    x = torch.randn(2000, 2000, device="cuda")
    return x[x > 0]


@pytest.fixture(scope="module")
def by_way(request):
    return request.getfixturevalue("positive")


@pytest.fixture
def by_name(request):
    return request.getfixturevalue("positive")


def measured(gpumem):
    gpumem.measure(lambda: torch.ones(1000, device="cuda"))


def test_first(gpumem, positive):
    measured(gpumem)


def test_second(gpumem, positive):
    measured(gpumem)


def test_third(gpumem, by_way):
    measured(gpumem)


def test_fifth(gpumem, by_way):
    measured(gpumem)


def test_fourth(gpumem, by_name):
    measured(gpumem)


def test_other(gpumem):
    measured(gpumem)
"""


@pytest.mark.parametrize("names", ["first second third fourth fifth other", "other fifth fourth third second first"])
def test_what_a_shared_fixture_reads_spoils_every_test_that_uses_it_in_any_order(session, tmp_path, names):
    (tmp_path / "test_it.py").write_text(SHARED, encoding="utf-8")
    tests = [f"test_it.py::test_{name}" for name in names.split()]
    done = session("--gpumem-update=new", "--gpumem-report=report.json", *tests)
    results = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["results"]
    reasons = {result["verdict"]["test"]: result["verdict"]["unmeasured"] for result in results}
    assert reasons.pop("test_other") is None, done.stdout
    assert len(reasons) == 5
    for reason in reasons.values():
        assert "a boolean index reads values that an emulated GPU does not compute, at " in reason
        assert "test_it.py:9 (in fixture " in reason


READS = "import torch\n\nSIZE = int((torch.randn(2000, 2000, device='cuda') > 0).sum())\n"
MEASURES = "\n\ndef test_it(gpumem):\n    gpumem.measure(lambda: torch.ones(1000, device='cuda'))\n"


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "worker"])
def test_what_is_read_while_a_file_is_imported_spoils_its_tests_and_no_others(session, tmp_path, workers):
    for name, text in {
        "test_reads.py": READS + MEASURES,
        "test_after.py": "import torch\n" + MEASURES,
        "inside/conftest.py": READS,
        "inside/test_inside.py": "import torch\n" + MEASURES,
        "later/test_later.py": "import torch\n" + MEASURES,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    done = session("--gpumem-update=new", "--gpumem-report=report.json", *workers)
    results = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["results"]
    reasons = {result["verdict"]["file"]: result["verdict"]["unmeasured"] for result in results}
    assert reasons.pop("test_after.py") is None, done.stdout
    assert reasons.pop("later/test_later.py") is None
    assert reasons.pop("test_reads.py").endswith("test_reads.py:3 (while test_reads.py was collected)")
    assert "inside/conftest.py:3 (while inside" in reasons.pop("inside/test_inside.py")
    assert reasons == {"test_it.py": None}  # the session's own


DECIDES = """
import pytest
import torch


@pytest.fixture(scope="module")
def small():
    return torch.randn(100, 100, device="cuda").mean().item() < 0.1


def test_branch(gpumem):
    def step():
        x = torch.randn(2000, 2000, device="cuda")
        return x * 2 if x.mean().item() < 0.1 else x

    gpumem.measure(step)


def test_log(gpumem):
    gpumem.measure(lambda: print(torch.randn(2000, 2000, device="cuda").mean().item()))


def test_first(gpumem, small):
    gpumem.measure(lambda: torch.ones(1000, device="cuda"))


def test_second(gpumem, small):
    gpumem.measure(lambda: torch.ones(1000, device="cuda"))
"""


@pytest.mark.parametrize(
    "workers", [pytest.param((), id="alone"), pytest.param(("-n", "2"), id="workers", marks=pytest.mark.thorough)]
)
def test_a_branch_that_a_value_decided_is_noted_and_fails_strictly(session, tmp_path, workers):
    (tmp_path / "test_it.py").write_text(DECIDES, encoding="utf-8")
    options = ("test_it.py", "--gpumem-report=report.json", *workers)
    session("--gpumem-update=new", *options)
    gated = session("--gpumem-baseline", *options)
    assert gated.returncode == 0, gated.stdout
    assert "an uncomputed value decided a branch at " in gated.stdout
    results = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["results"]
    notes = {one["verdict"]["test"]: one["verdict"]["verdicts"][0]["measurement"]["notes"] for one in results}
    assert "decided a branch at" in notes["test_branch"][0]
    assert "test_it.py:14" in notes["test_branch"][0]
    assert "values were read at" in notes["test_log"][0]
    assert "test_it.py:20" in notes["test_log"][0]
    assert "test_it.py:8" in notes["test_first"][0]
    assert notes["test_first"] == notes["test_second"]
    strict = session("--gpumem-baseline", "--gpumem-strict", *options)
    assert strict.returncode == 1
    assert "3 failed, 1 passed" in strict.stdout
    assert "Not certain (required by --gpumem-strict): an uncomputed value decided a branch at " in strict.stdout


DRAWS = """
import pytest
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        draws = torch.Generator().manual_seed(0)
        self.register_buffer("noise", torch.randn(64, generator=draws))
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        nn.init.normal_(self.up.weight.cpu(), generator=draws)

    def forward(self, x):
        return self.down(self.up(x + self.noise).relu())


def batch():
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


def loss(out, _):
    return out.square().mean()


@pytest.mark.parametrize("config", [None, "bf16", "fp32,shard=fsdp,world=2", "fp32,shard=ddp,world=2"])
def test_train(gpumem, config):
    gpumem.train_step(Net, batch, loss=loss, config=config)


def test_infer(gpumem):
    gpumem.infer_step(Net, batch)


def test_a_model_that_exists(gpumem):
    gpumem.infer_step(Net().to(gpumem.device), batch)
"""


def test_models_and_batches_that_draw_with_a_generator_of_the_cpu_are_measured(processes, tmp_path):
    (tmp_path / "test_it.py").write_text(DRAWS, encoding="utf-8")
    done = processes.pytest("-v")
    assert done.returncode == 0, done.stdout
    assert "6 passed" in done.stdout


READ_BEFORE = """
import pytest
import torch


def values():
    return torch.rand(300, 300, device="cuda")


@pytest.fixture
def smallest():
    return values()[values() > 0.5].min()  # line 12


def test_error(gpumem):
    gpumem.measure(lambda: values()[values() > 0.5].min())  # line 16


def test_assertion(gpumem):
    gpumem.measure(values)
    assert (values() > 0.5).any()  # line 21


def test_branch(gpumem):
    if float(values().sum()) < 1:  # line 25
        pytest.fail("too small")


def test_set_up(gpumem, smallest):
    gpumem.measure(values)


def test_others_assertion(gpumem):
    assert 1 == 2


def test_others_error(gpumem):
    raise KeyError("of the test")


def test_skip(gpumem):
    if values().sum().item() < 1:
        pytest.skip("too small")


def test_trace(gpumem):
    gpumem.measure(lambda: torch.jit.trace(lambda x: x * 2 if x.any() else x, values(), check_trace=False))


def test_after(gpumem):
    gpumem.measure(values)
"""


def test_an_error_after_a_read_of_uncomputed_values_names_the_line_that_read(processes, tmp_path):
    (tmp_path / "test_it.py").write_text(READ_BEFORE, encoding="utf-8")
    done = processes.pytest()
    assert "INTERNALERROR" not in done.stdout + done.stderr
    assert "5 failed, 2 passed, 1 skipped" in done.stdout.splitlines()[-1]
    titles = re.split(r"^_+ (?:ERROR at setup of )?(test_\w+) _+$", done.stdout, flags=re.MULTILINE)
    told = dict(zip(titles[1::2], titles[2::2], strict=True))
    before = {name: re.findall(r"^before this error: .*$", text, re.MULTILINE) for name, text in told.items()}
    lines = {name: re.findall(r"test_it\.py:(\d+)", "".join(text)) for name, text in before.items()}
    assert lines == {
        "test_set_up": ["12"],
        "test_error": ["16"],
        "test_assertion": ["21"],
        "test_branch": ["25"],
        "test_others_assertion": [],
        "test_others_error": [],
    }
    assert "a boolean index reads values that an emulated GPU does not compute, at " in before["test_error"][0]
    assert before["test_error"][0].endswith(". The error may come from these reads and not from the code")
    said = "an emulated GPU computes the values of small tensors only, so an assertion about a larger tensor proves nothing here"
    assert [name for name, text in told.items() if said in text] == ["test_others_assertion"]
    assert re.search(r"^gpumem: .*\b1 recorded \(no budget, and no", done.stdout, re.MULTILINE)
