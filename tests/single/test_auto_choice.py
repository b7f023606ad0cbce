"""The selection of AutoAlgorithm, which needs no other rank: trials, the choice, trying again."""

import pytest
from bagua.torch_api.algorithms import (
    AutoAlgorithm,
    ByteGradAlgorithm,
    GradientAllReduceAlgorithm,
    SparseAlgorithm,
)
from bagua.torch_api.algorithms.auto import (
    SLOWER,
    TIMED,
    WARM_UP,
    WINDOWS,
    Selection,
    Trial,
    label_of,
)

EXACT, EIGHT, FOUR = "exact", "eight", "four"
ERRORS = {EXACT: 0.0, EIGHT: 0.01, FOUR: 0.15}
STEPS = 1 + WARM_UP + TIMED  # of a trial: the first one only begins the next


class Run:
    """Steps of a selection on a clock that a test turns.

    `seconds`, `errors`: of the steps of each candidate; `breached`: of the guard.
    """

    def __init__(self, seconds, errors=ERRORS, max_error=0.3):
        self.seconds, self.errors, self.breached = seconds, dict(errors), set()
        self.now = 0.0
        self.at_work = []
        trials = [Trial(GradientAllReduceAlgorithm(), name) for name in seconds]
        self.selection = Selection(trials, max_error, lambda mine: mine)

    def steps(self, count):
        for _ in range(count):
            name = self.selection.at_work.label
            self.at_work.append(name)
            self.now += self.seconds[name]
            breached = name in self.breached
            self.selection.step_ended(self.now, self.errors[name], breached)
        return self.selection

    def to_the_end(self):
        while not self.selection.chosen:
            assert len(self.at_work) < 500
            self.steps(1)
        return self.selection


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((1.0, 0.98, 0.99), EXACT),
        ((1.0, 0.9, 0.89), EIGHT),
        ((1.0, 0.9, 0.8), FOUR),
        ((0.5, 0.7, 0.9), EXACT),
        ((1.0, 0.96, 2.0), EIGHT),
        ((1.0, 0.971, 2.0), EXACT),
    ],
)
def test_the_fastest_is_taken_and_within_three_percent_what_loses_least(seconds, expected):
    run = Run(dict(zip(ERRORS, seconds, strict=True)))
    selection = run.to_the_end()
    assert selection.at_work.label == expected
    assert run.at_work == [name for name in ERRORS for _ in range(STEPS)]
    assert [trial.seconds for trial in selection.trials] == pytest.approx(list(seconds))
    assert "ms" in selection.why


def test_a_far_network_is_told_to_those_who_could_train_in_rounds():
    for exact, told in ((1.0, False), (1.2, False), (1.3, True), (9.0, True)):
        selection = Run({EXACT: exact, EIGHT: 0.9, FOUR: 0.5}).to_the_end()
        assert selection.at_work.label == FOUR
        assert ("DiLoCoAlgorithm would send once" in selection.why) == told


FASTER = {EXACT: 1.0, EIGHT: 0.9, FOUR: 0.5}


def test_an_error_that_is_not_allowed_or_not_measured_is_refused_with_the_reason():
    cases = [
        (0.15, 0.1, EIGHT, "error above 0.1"),
        (0.4, 0.3, EIGHT, "error above 0.3"),
        (None, 0.3, EIGHT, "its error was not measured"),
        (0.15, 0.3, FOUR, ""),
        (0.15, 0.0, EXACT, "error above 0"),
    ]
    for error, max_error, expected, reason in cases:
        selection = Run(FASTER, ERRORS | {FOUR: error}, max_error).to_the_end()
        assert selection.at_work.label == expected
        assert selection.values()["table"][2]["refusal"] == reason
        assert reason in selection.table_text()


def test_the_first_error_of_a_trial_counts_and_one_slow_step_does_not():
    run = Run(FASTER)
    run.steps(2 * STEPS + 3)
    run.errors[FOUR] = 0.9  # with residuals of earlier rounds
    run.steps(2)
    run.now += 100.0  # an evaluation
    selection = run.to_the_end()
    assert selection.at_work.label == FOUR
    assert selection.trials[2].error == 0.15
    assert selection.trials[2].seconds == pytest.approx(0.5)


def test_a_breach_in_a_trial_ends_it_and_one_after_the_choice_ends_in_exact_gradients():
    run = Run(FASTER)
    run.breached = {EIGHT}
    selection = run.to_the_end()
    assert run.at_work.count(EIGHT) == 1
    assert selection.at_work.label == FOUR
    run.breached = {EIGHT, FOUR}
    assert run.steps(1).at_work.label == EXACT
    assert selection.chosen
    assert selection.why == "four lost more than the guard allows"
    run.seconds = dict.fromkeys(FASTER, 10.0)
    run.steps(1000)
    assert set(run.at_work[-1000:]) == {EXACT}, "there is nothing to try again"


def test_steps_that_are_slower_by_half_for_long_make_it_try_again():
    run = Run(FASTER)
    selection = run.to_the_end()
    window = 20
    run.seconds = {EXACT: 0.5, EIGHT: 1.0, FOUR: 0.5 * SLOWER + 0.01}
    run.steps(1 + (WINDOWS - 1) * window)
    run.seconds = FASTER
    run.steps(window)
    assert selection.chosen, "they are as before again"
    run.seconds = {EXACT: 0.5, EIGHT: 1.0, FOUR: 0.5 * SLOWER + 0.01}
    run.steps(WINDOWS * window - 1)
    assert selection.chosen
    run.steps(1)
    assert not selection.chosen
    assert selection.at_work.label == EXACT
    assert "760.0 ms, 500.0 ms when it was chosen" in selection.why
    run.to_the_end()
    assert (selection.at_work.label, selection.turns) == (EXACT, 2)


def test_a_choice_of_a_checkpoint_takes_its_first_window_for_reference():
    run = Run(FASTER)
    run.selection.choose(run.selection.trials[2], "restored")
    run.seconds = FASTER | {FOUR: 7.0}
    assert run.steps(1000).at_work.label == FOUR
    run.seconds = FASTER | {FOUR: 7.1 * SLOWER}
    run.steps(1 + WINDOWS * 20)
    assert not run.selection.chosen


def test_labels_are_calls_without_defaults():
    labels = {
        "gradient_allreduce": GradientAllReduceAlgorithm(),
        "bytegrad": ByteGradAlgorithm(),
        "bytegrad(codec='int4_block', error_feedback=True, hierarchical=False)": ByteGradAlgorithm(
            False, codec="int4_block", error_feedback=True
        ),
        "sparse(ratio=0.5)": SparseAlgorithm(0.5),
    }
    assert {label_of(algorithm): algorithm for algorithm in labels.values()} == labels


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"candidates": "bytegrad"}, r"a list of names: \['bytegrad'\]"),
        ({"candidates": ["bytegrad", "bytegrad"]}, "is given twice"),
        ({"candidates": [3]}, "names or algorithms"),
        ({"candidates": ["?"]}, "unknown algorithm"),
        ({"max_error": -1.0}, "max_error=-1.0"),
    ],
)
def test_arguments_are_checked_by_name(arguments, said):
    with pytest.raises((TypeError, ValueError, KeyError), match=said):
        AutoAlgorithm(**arguments)
