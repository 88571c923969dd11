"""Virtual time: in order, first planned first, and nothing of a life that is over."""

from holdfast.sim.scale.virtual_clock import ALWAYS, VirtualClock


def test_order_and_lives() -> None:
    clock, seen = VirtualClock(), list[tuple[float, str]]()

    def note(what: str) -> None:
        seen.append((clock.now, what))

    def end() -> None:
        clock.life += 1
        clock.call_later(1.0, note, "of the next life")

    clock.call_later(2.0, note, "second")
    clock.call_later(2.0, note, "third")
    clock.call_later(1.0, note, "first")
    clock.call_later(3.0, end)
    clock.call_later(5.0, note, "left over")
    clock.call_at(ALWAYS, 5.0, note, "whatever comes")
    clock.call_later(9.0, note, "too late")
    clock.run(6.0)
    whole = [(1.0, "first"), (2.0, "second"), (2.0, "third"), (4.0, "of the next life"), (5.0, "whatever comes")]
    assert seen == whole and clock.now == 6.0
