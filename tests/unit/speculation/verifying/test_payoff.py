"""Whether drafting pays, on steps whose times are made up."""

import pytest

from speculation.verifying.payoff import BREAK_EVEN, FIRST_PROBE, FIRST_REST, LONGEST_REST, OFTEN, PROBE, SETTLE, Payoff

PLAIN = 0.010


class Device:
    """A target whose steps take ``slower`` times as long while drafters work, and commit ``gain`` tokens a session."""

    def __init__(self, gain: float, slower: float, sessions: int = 1) -> None:
        self.payoff = Payoff()
        self.gain, self.slower, self.sessions = gain, slower, sessions
        self.plain, self.quiet_for = PLAIN, 0
        self.seconds = self.tokens = 0.0
        self.changes: list[tuple[str, int]] = []
        """What drafters did, and for how many steps, in turn."""

    def steps(self, count: int) -> None:
        for _ in range(count):
            drafting = self.payoff.drafting
            self.quiet_for = 0 if drafting else self.quiet_for + 1
            quiet = self.quiet_for >= SETTLE
            seconds = self.plain if quiet else self.plain * self.slower
            self.seconds += seconds
            self.tokens += self.gain if drafting else 1.0
            state = "work" if drafting else "probe" if self.payoff.probing else "rest"
            if not self.changes or self.changes[-1][0] != state:
                self.changes.append((state, 0))
            self.changes[-1] = (state, self.changes[-1][1] + 1)
            self.payoff.observe(self.sessions, seconds, quiet=quiet)
            if drafting:
                self.payoff.drafted(self.sessions, round(self.gain * self.sessions), seconds)
            else:
                self.payoff.rested()

    @property
    def over_plain(self) -> float:
        return self.tokens / self.seconds * PLAIN

    def lengths(self, state: str) -> list[int]:
        return [count for found, count in self.changes if found == state]


def test_what_plain_decoding_takes_is_found_out_early():
    device = Device(gain=2, slower=1.2)
    device.steps(FIRST_PROBE + PROBE)
    assert device.changes == [("work", FIRST_PROBE), ("probe", PROBE)]
    assert device.payoff.cost(quiet=True)(1) == pytest.approx(PLAIN)
    assert device.payoff.cost(quiet=False)(1) == pytest.approx(1.2 * PLAIN)


@pytest.mark.parametrize("sessions", [1, 8, 64])
def test_a_machine_that_becomes_slower_is_no_reason_to_rest(sessions):
    """Right behind a probe, too, beside which all steps then look as if they were lost."""
    device = Device(gain=3, slower=1.2, sessions=sessions)
    device.steps(FIRST_PROBE + PROBE)
    for _ in range(4):
        device.plain *= 4
        device.steps(400)
    assert device.lengths("rest") == []
    assert len(device.lengths("probe")) > 4


@pytest.mark.parametrize("gain", [1, 2, 4, 8])
def test_where_drafting_pays_probes_cost_less_than_a_percent(gain):
    device = Device(gain, slower=1.0)
    device.steps(20_000)
    assert device.lengths("rest") == []
    assert device.over_plain > 0.99 * gain
    assert len(device.lengths("probe")) > 5, "and yet there are some"
    assert min(device.lengths("work")[1:-1]) >= OFTEN


@pytest.mark.parametrize(("gain", "slower"), [(1, 1.3), (1, 1.05), (2, 2.5)])
@pytest.mark.parametrize("sessions", [1, 16])
def test_where_it_does_not_pay_drafters_rest_longer_and_longer(gain, slower, sessions):
    device = Device(gain, slower, sessions)
    device.steps(20_000)
    rests = device.lengths("rest")
    assert rests[:3] == [FIRST_REST, 2 * FIRST_REST, 4 * FIRST_REST]
    assert max(rests) == LONGEST_REST
    assert device.over_plain > 0.985


def test_it_comes_back_when_drafting_pays_again_and_then_rests_briefly_first():
    device = Device(gain=1, slower=1.3)
    device.steps(2000)
    device.gain = 3
    device.changes.clear()
    device.steps(3000)
    assert device.changes[-1][0] == "work"
    device.gain = 1
    device.changes.clear()
    device.steps(1000)
    assert FIRST_REST in device.lengths("rest")


def test_a_machine_that_has_become_slower_is_told_from_drafting_that_does_not_pay(monkeypatch):
    device = Device(gain=2, slower=1.2)
    device.steps(1000)
    monkeypatch.setattr("tests.unit.speculation.verifying.test_payoff.PLAIN", 2.5 * PLAIN)
    device.steps(1000)
    assert device.lengths("rest") == []
    assert len(device.lengths("probe")) > 2


def test_break_even_is_what_steps_take_longer_beside_drafters():
    payoff = Payoff()
    payoff.observe(1, 0.0135, quiet=False)
    assert payoff.break_even(1) == BREAK_EVEN, "unknown"
    payoff.observe(1, 0.010, quiet=True)
    assert payoff.break_even(1) == pytest.approx(0.35)


def test_larger_steps_beside_drafters_do_not_tell_what_a_plain_one_takes():
    payoff = Payoff()
    payoff.observe(1, 0.010, quiet=True)
    payoff.observe(8, 0.014, quiet=False)
    assert payoff.break_even(1) == BREAK_EVEN
    classes = Payoff((16, 32))
    classes.observe(1, 0.010, quiet=True)
    classes.observe(8, 0.014, quiet=False)
    assert classes.break_even(1) == pytest.approx(0.4), "it computes as many rows"
