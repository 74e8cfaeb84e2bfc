"""The lines that made what is there before a recording: a model's parameters and buffers."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from pytest_gpumem.measuring.explain.call_sites import creation_sites
from pytest_gpumem.measuring.explain.sites import Site, Sites

HERE = Path(__file__)


def line() -> int:
    """The line that calls this."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


@pytest.fixture
def found() -> dict[int, Site]:
    return {}


@pytest.fixture
def sites() -> Sites:
    return Sites(HERE.parent)


def lines(found: dict[int, Site], model: torch.nn.Module) -> dict[str, str]:
    """Which line made each parameter and buffer."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: found[tensor.untyped_storage().data_ptr()].user for name, tensor in named}


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 4); self.fc_line = line()  # fmt: skip # noqa: E702
        self.scale = torch.nn.Parameter(torch.ones(4)); self.scale_line = line()  # fmt: skip # noqa: E702
        self.register_buffer("mask", torch.zeros(4)); self.mask_line = line()  # fmt: skip # noqa: E702


def test_each_part_of_nested_modules_is_made_by_its_own_line(sites, found):
    with creation_sites(sites, found):
        model = torch.nn.Sequential(*(Block() for _ in range(2)))
    block = model[0]
    for number in range(2):
        made = {name.partition(".")[2]: where for name, where in lines(found, model).items() if name[0] == str(number)}
        assert made == {
            "fc.weight": f"test_creation_sites.py:{block.fc_line}",
            "fc.bias": f"test_creation_sites.py:{block.fc_line}",
            "scale": f"test_creation_sites.py:{block.scale_line}",
            "mask": f"test_creation_sites.py:{block.mask_line}",
        }


def test_working_in_place_on_a_tensor_makes_nothing(sites, found):
    with creation_sites(sites, found):
        model = torch.nn.Linear(8, 16); made = line()  # fmt: skip # noqa: E702
        torch.nn.init.xavier_uniform_(model.weight)
        with torch.no_grad():
            model.weight.mul_(2).add_(1)
            model.bias.zero_()
    assert set(lines(found, model).values()) == {f"test_creation_sites.py:{made}"}


def test_a_view_of_a_tensor_is_not_made_where_it_is_taken(sites, found):
    with creation_sites(sites, found):
        base = torch.ones(8, 8); made = line()  # fmt: skip # noqa: E702
        views = [base[2:4], base.view(64), base.t(), *base.chunk(2), *torch.broadcast_tensors(base, base[0])]
    addresses = {view.untyped_storage().data_ptr() for view in views}
    assert {found[address].user for address in addresses} == {f"test_creation_sites.py:{made}"}


def test_a_view_of_a_tensor_in_a_list_is_not_made_where_it_is_taken(sites, found):
    with creation_sites(sites, found):
        base = torch.ones(8); made = line()  # fmt: skip # noqa: E702
        torch.meshgrid([base, base], indexing="ij")
        torch._foreach_add_([base], 1.0)
    assert found[base.untyped_storage().data_ptr()].user == f"test_creation_sites.py:{made}"


def test_an_address_that_is_used_again_is_of_the_line_that_used_it_last(sites, found):
    with creation_sites(sites, found):
        for _ in range(20):
            # The allocator gives the same block to each, nearly always.
            first = torch.ones(1000); made = line()  # fmt: skip # noqa: E702
            assert found[first.untyped_storage().data_ptr()].user == f"test_creation_sites.py:{made}"
            del first
            second = torch.ones(1000); made = line()  # fmt: skip # noqa: E702
            assert found[second.untyped_storage().data_ptr()].user == f"test_creation_sites.py:{made}"
            del second


def test_parameters_without_memory_are_passed_over_and_break_nothing(sites, found):
    with creation_sites(sites, found):
        on_meta = torch.nn.Linear(8, 16, device="meta")
        lazy = torch.nn.LazyLinear(4)
        nothing = torch.nn.Parameter(torch.empty(0, 8))
    assert on_meta.weight.is_meta
    assert torch.nn.parameter.is_lazy(lazy.weight)
    assert nothing.numel() == 0
    assert 0 not in found, "there is nothing at address 0"


def test_fake_and_sparse_tensors_are_passed_over(sites, found):
    from torch._subclasses.fake_tensor import FakeTensorMode

    sparse = torch.eye(4).to_sparse()
    with creation_sites(sites, found):
        with FakeTensorMode():
            torch.nn.Linear(8, 16)
        sparse.coalesce()
    assert 0 not in found


def test_a_model_that_is_constructed_by_a_library_is_of_the_line_that_asked_for_it(sites, found, tmp_path):
    path = tmp_path / "site-packages" / "models" / "gpt.py"
    path.parent.mkdir(parents=True)
    path.write_text("import torch\n\n\ndef gpt():\n    return torch.nn.Linear(2, 2)\n", encoding="utf-8")
    scope: dict[str, object] = {}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), scope)
    with creation_sites(sites, found):
        model = scope["gpt"](); made = line()  # type: ignore[operator]  # fmt: skip # noqa: E702
    site = found[model.weight.untyped_storage().data_ptr()]
    assert (site.user, site.library) == (f"test_creation_sites.py:{made}", "models/gpt.py:5")


def test_nothing_is_entered_before_or_afterwards(sites, found):
    before = torch.ones(4)
    with creation_sites(sites, found):
        pass
    after = torch.ones(4)
    assert found == {}
    assert before.sum() == after.sum()
    assert torch.overrides._len_torch_function_stack() == 0


def test_the_values_are_those_that_would_be_without(sites, found):
    torch.manual_seed(0)
    plain = torch.nn.Linear(8, 16)
    torch.manual_seed(0)
    with creation_sites(sites, found):
        watched = torch.nn.Linear(8, 16)
    assert torch.equal(plain.weight, watched.weight)
    assert type(watched.weight) is torch.nn.Parameter


def test_a_freed_tensor_leaves_no_line_for_a_later_tensor_at_its_address(sites):
    by_address = {}
    with creation_sites(sites, by_address):
        kept, freed = torch.ones(1000), torch.ones(2000)
        addresses = kept.data_ptr(), freed.data_ptr()
        view = kept[1:]
        del kept, freed
    assert addresses[0] in by_address
    assert addresses[1] not in by_address
    del view
