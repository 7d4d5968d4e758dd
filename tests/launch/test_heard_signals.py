"""What signals to a launcher mean."""

from __future__ import annotations

from signal import SIGHUP, SIGINT, SIGTERM, SIGUSR1

from kolovod.launch.heard_signals import HeardSignals, Meaning


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def heard(*signals: tuple[int, str, float]) -> list[tuple[int, Meaning]]:
    """What these mean that come by a way at a time."""
    clock = Clock()
    signals_heard = HeardSignals(clock)
    found = []
    for signum, way, clock.now_s in signals:
        signals_heard.add(signum, way)
        while (one := signals_heard.take()) is not None:
            found.append(one)
    return found


def test_the_first_ends_the_job_and_another_one_kills_it() -> None:
    assert heard((SIGTERM, "", 0.0)) == [(SIGTERM, Meaning.END)]
    assert heard((SIGINT, "", 0.0), (SIGINT, "", 1.0), (SIGTERM, "", 1.1)) == [
        (SIGINT, Meaning.END),
        (SIGINT, Meaning.KILL),
        (SIGTERM, Meaning.KILL),
    ]


def test_one_signal_to_all_processes_is_no_second_wish() -> None:
    """As of systemd: to the viewer, which passes it on, to the daemon itself, and by SIGHUP."""
    ended = [(SIGTERM, Meaning.END)]
    assert heard((SIGTERM, "", 0.0), (SIGTERM, "viewer", 3.0)) == ended
    assert heard((SIGTERM, "viewer", 0.0), (SIGTERM, "", 3.0)) == ended
    assert heard((SIGTERM, "", 0.0), (SIGTERM, "", 0.01), (SIGHUP, "", 0.02)) == ended
    twice = heard((SIGTERM, "", 0.0), (SIGTERM, "viewer", 0.0), (SIGTERM, "viewer", 2.0))
    assert twice == [*ended, (SIGTERM, Meaning.KILL)]


def test_what_only_ranks_understand_is_passed_on_and_ends_nothing() -> None:
    signals = HeardSignals()
    signals.add(SIGUSR1)
    assert not signals
    assert signals.take() == (SIGUSR1, Meaning.PASS_ON)
    assert heard((SIGUSR1, "", 0.0), (SIGTERM, "", 1.0), (SIGUSR1, "", 2.0)) == [
        (SIGUSR1, Meaning.PASS_ON),
        (SIGTERM, Meaning.END),
        (SIGUSR1, Meaning.PASS_ON),
    ]
    signals.add(SIGTERM)
    assert signals
