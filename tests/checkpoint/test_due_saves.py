"""DueSaves: one save runs, at most one waits, and skipped saves are reported."""

from __future__ import annotations

import pytest

from coarse.checkpoint.due_saves import DueSaves


def saved_steps(every, num_steps, steps_to_write):
    """The saved steps if each save takes `steps_to_write` steps, and the number of skipped saves."""
    due, saved, num_skipped, free_at = DueSaves(every), [], 0, 0
    for step in range(1, num_steps + 1):
        due.note(step, is_asked=False)
        if due.is_waiting and step >= free_at:
            num_skipped += due.begin(step)
            saved.append(step)
            free_at = step + steps_to_write
    return saved, num_skipped, due.is_waiting


@pytest.mark.parametrize(
    ("every", "steps_to_write", "saved", "num_skipped", "is_waiting"),
    [
        (4, 1, [4, 8, 12], 0, False),
        (4, 4, [4, 8, 12], 0, False),
        (4, 6, [4, 10], 0, True),
        (2, 5, [2, 7, 12], 3, False),
        (0, 1, [], 0, False),
    ],
)
def test_a_save_that_is_due_waits_for_the_one_before(every, steps_to_write, saved, num_skipped, is_waiting):
    assert saved_steps(every, 12, steps_to_write) == (saved, num_skipped, is_waiting)


def test_the_every_that_a_warning_names_skips_nothing(caplog):
    assert saved_steps(2, 12, 5)[1] > 0
    assert "With every=5 or more" in caplog.text
    assert saved_steps(5, 100, 5)[1] == 0


def test_what_is_asked_for_waits_and_is_never_skipped():
    due = DueSaves(0)
    for step in (1, 2, 3):
        due.note(step, is_asked=True)
    assert due.is_waiting
    assert due.begin(3) == 0
    assert not due.is_waiting


def test_going_on_from_another_step_forgets_what_was_due(caplog):
    due = DueSaves(1)
    due.note(1, is_asked=True)
    due.note(2, is_asked=False)
    due.forget()
    assert not due.is_waiting
    assert due.begin(9) == 0
    assert not caplog.records
