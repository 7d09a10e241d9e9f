"""The lease of a workdir in a bucket: one run at a time, whatever is lost, late or killed."""

from __future__ import annotations

import json

import fake_bucket
import pytest

from jaxformer.errors import ConfigError, StorageError
from jaxformer.runtime import lease as leases
from jaxformer.runtime.lease import Lease
from jaxformer.runtime.object_store import Store

URL = "s3://bucket/runs/one"
LOST = ValueError("ABORTED: Empty reply from server")


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    return fake_bucket.install(monkeypatch, tmp_path)


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only in `sleep`, where `clock.each` is called. No thread renews."""

    class Clock:
        now = 1000.0
        each = staticmethod(lambda: None)

        def monotonic(self):
            return self.now

        def sleep(self, seconds):
            self.now += seconds
            self.each()

        def strftime(self, form):
            return "then"

    clock = Clock()
    monkeypatch.setattr(leases, "time", clock)
    monkeypatch.setattr(Lease, "_renew_regularly", lambda self: None)
    return clock


def make(mirror="this"):
    return Lease(Store(URL, retry_seconds=0.01), mirror)


def owner(lease):
    return json.loads(lease.store.read(leases.KEY).value)


def test_a_second_run_is_refused_and_told_whose_the_first_is(bucket, clock, capsys):
    first, second = make(), make("that")
    first.acquire()
    clock.each = first.renew
    with pytest.raises(
        ConfigError, match=rf"workdir {URL}: got a run that is training in it \(process \d+ on .* since"
    ):
        second.acquire()
    assert owner(first)["token"] == first.token
    assert "waiting up to 120 s for signs of life" in capsys.readouterr().err


def test_a_lease_is_taken_over_once_it_has_expired(bucket, clock):
    first, second = make(), make("that")
    first.acquire()
    begun = clock.now
    second.acquire()
    assert leases.LEASE_SECONDS <= clock.now - begun < leases.LEASE_SECONDS + 5
    assert owner(second)["token"] == second.token
    with pytest.raises(StorageError, match="got another run that has taken over its lock.*nothing more is published"):
        first.check()
    first.release()  # not its own any more
    assert owner(second)["token"] == second.token and first.lost
    second.check()


def test_a_request_of_a_killed_run_may_still_arrive(bucket, clock):
    first, second, late = make(), make("that"), [None]
    first.acquire()
    clock.each = lambda: late and late.pop() is None and first.renew()
    begun = clock.now
    second.acquire()
    assert clock.now - begun >= leases.LEASE_SECONDS + leases.POLL_SECONDS and not late
    assert owner(second)["token"] == second.token


def test_a_renewal_at_the_last_moment_is_not_overwritten(bucket, clock):
    first, second, requests = make(), make("that"), []
    first.acquire()
    limit = clock.now + leases.LEASE_SECONDS

    def renew(verb, key):
        if clock.now >= limit:
            requests.append(verb)
            if len(requests) == 2:  # after the last look of the one that waits
                first.renew()
                clock.each = first.renew

    bucket.before = renew
    with pytest.raises(ConfigError, match="got a run that is training"):
        second.acquire()
    assert requests[:2] == ["read", "write"] and owner(first)["token"] == first.token


def test_the_dead_of_the_same_folder_and_those_who_left_are_not_waited_for(bucket, clock, monkeypatch):
    monkeypatch.setattr(leases, "GRACE_SECONDS", 3.0)
    begun = clock.now
    make().acquire()
    second = make()
    second.acquire()
    assert clock.now == begun + 3.0  # requests of the dead that are under way may arrive
    second.release()
    third = make("that")
    third.acquire()
    assert clock.now == begun + 3.0 and owner(third)["token"] == third.token


def test_a_run_that_ends_while_another_waits_makes_room_at_once(bucket, clock):
    first, second = make(), make("that")
    first.acquire()
    clock.each = first.release
    begun = clock.now
    second.acquire()
    assert clock.now - begun <= leases.POLL_SECONDS and owner(second)["token"] == second.token


def test_a_lease_that_cannot_be_read_is_waited_for(bucket, clock):
    mine = make()
    mine.store.write(leases.KEY, b"torn")
    begun = clock.now
    mine.acquire()
    assert clock.now - begun >= leases.LEASE_SECONDS


def test_of_two_that_come_at_once_one_wins(bucket, clock):
    first, second = make(), make("that")
    seen = []

    def interfere(verb, key):
        if verb == "write" and not seen:
            seen.append(None)
            second.acquire()

    bucket.before = interfere
    clock.each = second.renew
    with pytest.raises(ConfigError, match="got a run that is training"):
        first.acquire()
    assert owner(second)["token"] == second.token


@pytest.mark.parametrize("lost", [1, 2])
def test_a_write_whose_answer_was_lost_is_ones_own(bucket, clock, lost):
    mine, answers = make(), [LOST] * lost
    bucket.after = lambda verb, key: answers.pop() if verb == "write" and answers else None
    mine.acquire()
    answers += [LOST] * lost
    mine.renew()
    mine.renew()
    assert owner(mine)["renewal"] == mine.count and not mine.lost


def test_a_renewal_that_was_given_up_and_yet_arrived_does_not_lose_the_lease(bucket, clock):
    mine = make()
    mine.acquire()
    bucket.after = lambda verb, key: LOST
    with pytest.raises(StorageError):
        mine.renew(0.005)
    bucket.after = lambda verb, key: None
    mine.renew()
    assert owner(mine)["renewal"] == mine.count


def test_an_owner_that_could_not_renew_asks_before_it_writes(bucket, clock):
    mine = make()
    mine.acquire()
    done = len(bucket.log)
    mine.check()
    assert len(bucket.log) == done  # fresh: nothing is asked
    clock.now += leases.LEASE_SECONDS - leases.MARGIN_SECONDS + 1
    mine.check()
    assert bucket.log[done:] == [("write", leases.KEY)]
    clock.now += leases.LEASE_SECONDS
    bucket.before = lambda verb, key: LOST
    with pytest.raises(StorageError, match="expected the storage to answer"):
        mine.check()
