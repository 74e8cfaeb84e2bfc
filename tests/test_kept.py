"""What every step keeps, told with the line that made it and what holds it, of steps that also replace tensors."""

from __future__ import annotations

CASES = """
import collections
import itertools
import linecache


def kept(measurement):
    \"\"\"The text of each line that is told to keep bytes, with these, and the attributes that hold them.\"\"\"
    explanation = measurement.explanation
    rows = {}
    for row in explanation.retained.rows:
        number = row.site.rpartition(":")[2]
        name = linecache.getline(__file__, int(number)).split("#")[1].strip()
        rows[name] = rows.get(name, 0) + row.nbytes
    assert sum(rows.values()) == explanation.retained.total
    peak = explanation.peak
    assert all(row.nbytes > 0 for row in peak.rows), peak.rows
    return rows, {holder.path.partition("State.")[2] for holder in explanation.holders}


class State:
    pass


@pytest.fixture
def state():
    return State()


def test_target(gpumem, state):
    state.predictions, net = [], torch.nn.Linear(64, 64)

    def step():
        state.batch = torch.ones(256, 64)
        output = net(state.batch)
        state.predictions.append(output.detach().clone())  # leak
        state.target = torch.zeros(256, 64)  # target

    assert kept(gpumem.measure(step, explain=True)) == ({"leak": 65536}, {"predictions[...]"})


@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients(gpumem, state, set_to_none):
    state.kept, net = [], torch.nn.Linear(64, 64, bias=False)

    def step():
        net.zero_grad(set_to_none=set_to_none)
        net(torch.ones(8, 64)).sum().backward()
        state.kept.append(torch.ones(64, 64))  # leak

    assert kept(gpumem.measure(step, explain=True)) == ({"leak": 16384}, {"kept[...]"})


def test_graph(gpumem, state):
    state.losses, net = [], torch.nn.Linear(64, 64)

    def step():
        hidden = torch.ones(256, 64) * net.weight.sum()  # hidden
        state.losses.append(hidden.tanh().mean())  # loss
        state.other = torch.zeros(256, 64)

    rows, holders = kept(gpumem.measure(step, explain=True))
    assert (rows, holders) == ({"hidden": 65536, "loss": 65536 + 4}, {"losses[...]"})


def test_full_deque(gpumem, state):
    state.window, state.kept = collections.deque(maxlen=3), []

    def step():
        state.window.append(torch.ones(100, 100))
        state.kept.append(torch.zeros(100, 100))  # leak

    assert kept(gpumem.measure(step, explain=True)) == ({"leak": 40000}, {"kept[...]"})


def test_cache(gpumem, state):
    state.cache, state.last = torch.zeros(64, 0), None

    def step():
        new = torch.ones(64, 16)
        state.cache = torch.cat([state.cache, new], dim=1)  # longer

    measurement = gpumem.measure(step, explain=True)
    assert kept(measurement) == ({"longer": 4096}, {"cache"})
    assert "is the difference" in " ".join(measurement.explanation.retained.notes)


def test_every_second(gpumem, state):
    state.kept, turns = [], itertools.cycle([True, False])

    def step():
        some = torch.ones(100, 100)  # leak
        state.last = torch.zeros(100, 100)
        if next(turns):
            state.kept.append(some)

    measurement = gpumem.measure(step, explain=True)
    assert kept(measurement) == ({"leak": 40000}, {"kept[...]"})
    (note,) = measurement.explanation.retained.notes
    assert note == "the recorded step kept 40.00 kB; on average each step keeps 20.00 kB"


def test_view(gpumem, state):
    state.kept = []

    def step():
        state.kept.append(torch.ones(100, 100)[:1])  # leak
        state.last = torch.zeros(100, 100)

    assert kept(gpumem.measure(step, explain=True)) == ({"leak": 40000}, {"kept[...]"})


def test_batches(gpumem, state):
    state.kept, lengths = [], itertools.cycle([500, 300, 400])

    def step():
        state.batch = torch.ones(next(lengths), 100)
        state.kept.append(torch.zeros(100, 100))  # leak

    assert kept(gpumem.measure(step, explain=True)) == ({"leak": 40000}, {"kept[...]"})


def test_loop(gpumem, state):
    state.predictions, net = [], torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with gpumem.loop(explain=True) as loop:
        while True:
            output = net(torch.ones(256, 64))
            state.predictions.append(output.detach().clone())  # leak
            state.target = torch.zeros(256, 64)
            (output - state.target).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert kept(loop.measurement) == ({"leak": 65536}, {"predictions[...]"})


def test_batch_of_the_size(gpumem):
    class Net(torch.nn.Linear):
        seen = ()

        def forward(self, x):
            x = super().forward(x)  # leak
            self.seen = (*self.seen, x.detach())
            return x

    measurement = gpumem.train_step(lambda: Net(64, 64), torch.ones(256, 64), loss=lambda out, _: out.sum(), explain=True)
    rows = measurement.explanation.peak.rows
    assert [(row.nbytes, row.count) for row in rows if row.category == "input"] == [(65536, 1)]
"""


def test_what_a_step_keeps_has_its_own_line_and_holder_whatever_the_step_replaces(project):
    project.write(CASES)
    result = project.run("--no-gpumem-time")
    result.assert_outcomes(passed=11)


def test_a_call_that_keeps_one_of_two_tensors_of_a_size_names_both_lines(project):
    project.write(
        """
class State:
    last, kept = None, []


@pytest.fixture
def state():
    state = State()
    state.last = torch.zeros(500, 1000)
    return state


@pytest.mark.gpumem(max_retained="1 MB")
def test_it(state):
    State.kept.append(torch.ones(500, 1000))  # kept
    state.last = torch.full((500, 1000), 2.0)  # replaced
"""
    )
    result = project.run("--no-gpumem-time")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "Memory over budget: retained 2.00 MB, budget 1.00 MB*",
            "  what was retained *",
            "  other * 2.00 MB *test_it.py:19 or test_it.py:20 *full or ones *1 x float32?500, 1000?",
            "  kept in: *State.kept?...? or *State.last",
            "  note: 1 of 2 tensors with 2.00 MB each is kept, but it is not known which, because *",
        ]
    )
