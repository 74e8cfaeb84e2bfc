"""A rank's session beside the thread that watches over it."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from pytest_gpumem.measuring.ranks.launch import launch_of
from pytest_gpumem.plugin.session.rank_session import RankSession

LAUNCHED = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_nothing_is_written_while_the_watch_reports_a_lost_rank(monkeypatch):
    launch = launch_of(LAUNCHED)
    assert launch is not None
    ranks, writing = RankSession(launch, 1.0), threading.Lock()
    monkeypatch.setattr(ranks, "_watch", SimpleNamespace(writing=writing))
    writing.acquire()
    main = threading.Thread(target=ranks.write_now, daemon=True)
    main.start()
    main.join(0.2)
    assert main.is_alive()

    writing.release()
    main.join(10)
    assert not main.is_alive()
    assert writing.locked()
    ranks.write_now()
