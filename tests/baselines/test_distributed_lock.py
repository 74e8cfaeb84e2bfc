"""The lock of numbered objects: one holder at a time, a dead one is followed, and one that came too late is told."""

from __future__ import annotations

import pytest

from pytest_gpumem.base.errors import DistributedLockError
from pytest_gpumem.judging.baselines.distributed_lock import (
    LOCK_SECONDS,
    WAIT_SECONDS,
    DistributedLock,
    _holder,
    _released,
)


class Shelf:
    """Objects in memory, and a clock that all who use them go by. Each request takes ``takes`` seconds."""

    def __init__(self) -> None:
        self.objects: dict[int, str] = {}
        self.now = 1000.0
        self.takes = 0.0
        self.exclusive = True
        self.before: dict[str, list] = {}

    def _happens(self, request: str) -> None:
        self.now += self.takes
        for action in self.before.pop(request, []):
            action()

    def numbers(self) -> list[int]:
        self._happens("numbers")
        return list(self.objects)

    def create(self, number: int, text: str) -> bool:
        self._happens("create")
        if self.exclusive and number in self.objects:
            return False
        self.objects[number] = text
        return True

    def read(self, number: int) -> str | None:
        self._happens("read")
        return self.objects.get(number)

    def replace(self, number: int, text: str) -> None:
        self._happens("replace")
        self.objects[number] = text

    def remove(self, number: int) -> None:
        self._happens("remove")
        self.objects.pop(number, None)

    def lease(self, *meanwhile) -> DistributedLock:
        """A lease whose pauses pass at once, with one of ``meanwhile`` in each."""
        actions = iter(meanwhile)

        def sleep(seconds: float) -> None:
            self.now += seconds
            next(actions, lambda: None)()

        return DistributedLock(self, clock=lambda: self.now, sleep=sleep)


@pytest.fixture
def shelf():
    return Shelf()


def test_a_lock_that_nobody_holds_is_had_at_once(shelf):
    assert shelf.lease().acquire()
    assert shelf.now == 1000
    assert list(shelf.objects) == [1]


def test_each_holder_leaves_one_object_behind(shelf):
    for number in (1, 2, 3):
        lease = shelf.lease()
        assert lease.acquire()
        lease.release()
        assert list(shelf.objects) == [number]
    assert shelf.now == 1000


def test_who_comes_second_waits_until_the_first_lets_go(shelf):
    first = shelf.lease()
    first.acquire()
    events = []
    second = shelf.lease(lambda: events.append("waits"), lambda: (events.append("released"), first.release()))
    assert second.acquire()
    assert events == ["waits", "released"]
    assert list(shelf.objects) == [2]


def test_a_dead_holder_is_followed_after_its_time_and_not_before(shelf):
    shelf.lease().acquire()
    followed = []
    shelf.before["create"] = [lambda: followed.append(shelf.now)]
    assert shelf.lease().acquire()
    assert followed[0] >= 1000 + LOCK_SECONDS
    assert followed[0] < 1000 + LOCK_SECONDS + 2


def test_a_holder_that_died_long_ago_is_watched_as_long(shelf):
    # Nobody knows what the clock of the other machine said.
    shelf.lease().acquire()
    shelf.now = 10_000
    shelf.lease().acquire()
    assert shelf.now >= 10_000 + LOCK_SECONDS


def test_an_object_that_nobody_understands_is_followed_like_a_dead_holder(shelf):
    for text in ("", "[]", "released", '{"released": "yes"}'):
        shelf.objects, shelf.now = {7: text}, 0
        assert shelf.lease().acquire()
        assert shelf.now >= LOCK_SECONDS
        assert list(shelf.objects) == [8]


def test_a_holder_that_renews_is_not_followed_and_is_named_in_the_end(shelf):
    holder = shelf.lease()
    holder.acquire()
    with pytest.raises(DistributedLockError, match=r"^locked by .*, process \d+ for more than 10 minutes$"):
        shelf.lease(*[holder.renew] * 10_000).acquire()
    assert shelf.now > 1000 + WAIT_SECONDS
    holder.release()
    assert shelf.lease().acquire()


def test_a_renewal_is_written_only_when_it_is_due(shelf):
    lease = shelf.lease()
    lease.acquire()
    before = dict(shelf.objects)
    lease.renew()
    assert shelf.objects == before
    shelf.now += LOCK_SECONDS / 2
    lease.renew()
    assert shelf.objects != before
    shelf.now += LOCK_SECONDS / 2
    lease.renew()
    lease.release()


def test_a_holder_that_was_followed_is_told_at_its_next_write_and_at_the_end(shelf):
    lease = shelf.lease()
    lease.acquire()
    shelf.lease().acquire()
    for action in (lease.renew, lease.release):
        with pytest.raises(DistributedLockError, match=r"the lock was lost: .* run the update once more"):
            action()
    assert list(shelf.objects) == [2]


def test_a_holder_that_was_followed_by_one_that_has_finished_is_told_as_well(shelf):
    lease, other = shelf.lease(), shelf.lease()
    lease.acquire()
    other.acquire()
    other.release()
    with pytest.raises(DistributedLockError, match="the lock was lost"):
        lease.release()


def test_a_renewal_that_comes_too_late_is_none(shelf):
    lease = shelf.lease()
    lease.acquire()
    shelf.now += LOCK_SECONDS - 1
    shelf.takes = 1
    with pytest.raises(DistributedLockError, match="a request took"):
        lease.renew()


def test_a_holder_that_renews_during_a_long_look_is_not_followed():
    class Slow(Shelf):
        looks = 0

        def read(self, number):
            text = super().read(number)
            self.looks += 1
            if self.looks == 2:
                self.now += LOCK_SECONDS - 1
                holder.renew()
                self.now += 1
            return text

    slow = Slow()
    holder = slow.lease()
    holder.acquire()
    # What the second look saw was as old as its beginning.
    assert slow.lease(lambda: None, holder.release).acquire()
    assert slow.looks == 3


def test_of_two_that_create_at_once_one_waits(shelf):
    first = shelf.lease()
    shelf.before["create"] = [first.acquire]
    second = shelf.lease(first.release)
    assert second.acquire()
    assert list(shelf.objects) == [2]


def test_who_looked_long_ago_does_not_get_a_number_that_is_gone(shelf):
    def others():
        for _ in range(2):
            lease = shelf.lease()
            lease.acquire()
            lease.release()
        holder.acquire()

    holder = shelf.lease()
    shelf.before["create"] = [others]
    late = shelf.lease(holder.release)
    # It creates number 1, which is not there any more: 3 is held.
    assert late.acquire()
    assert list(shelf.objects) == [4]


def test_a_request_that_was_sent_twice_finds_its_own_object(shelf):
    class Twice(Shelf):
        def create(self, number, text):
            super().create(number, text)
            return super().create(number, text)

    assert Twice().lease().acquire()


def test_a_place_that_creates_what_is_there_locks_nothing_and_keeps_nothing(shelf):
    shelf.exclusive = False
    assert not shelf.lease().acquire()
    assert shelf.objects == {}


def test_a_lock_is_given_back_when_it_cannot_be_tidied(shelf):
    def refuse():
        raise PermissionError

    first = shelf.lease()
    first.acquire()
    first.release()
    shelf.before["remove"] = [refuse]
    with pytest.raises(PermissionError):
        shelf.lease().acquire()
    shelf.now = 2000
    assert shelf.lease().acquire()
    assert shelf.now == 2000


@pytest.mark.parametrize("state", ["[" * 100_000, "5" * 5000, "no JSON", "[]"])
def test_a_lock_object_that_nobody_understands_is_held_by_somebody(state):
    assert not _released(state)
    assert _holder(state) == "somebody"
