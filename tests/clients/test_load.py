"""A hundred clients that break off at random, for a short time; `load.py` does the same for longer."""

import os

import pytest
from load import load


@pytest.mark.parametrize("cache_ram", [0, 64])
def test_a_hundred_clients_leave_nothing_behind(cache_ram):
    seen = load(seconds=10, clients=100, cache_ram=cache_ram)
    assert seen["faults"] == [], seen
    assert seen["answers"]["200"] > 10 and seen["answers"]["left"] > 50, seen
    assert seen["sequences_left"] == 0, seen
    if cache_ram == 0:
        assert seen["state_bytes"] == 0, seen
    assert seen["next_request_seconds"] < 1, seen
    # Each has memory of its own.
    assert seen["threads_most"] - seen["threads_before"] <= max(len(os.sched_getaffinity(0)), 4), seen
    assert seen["memory_last_quarter_mib"] < 1.1 * seen["memory_second_quarter_mib"] + 64, seen
