"""Many cases of one test: combinations in a loop, not as ids of their own."""

import functools
import inspect
import itertools


def over(**axes):
    """Runs the test with every combination of the axes' values. A failure names the combination.

    The test's other arguments stay fixtures, or parameters of a `parametrize` above this.
    """

    def decorate(test):
        return looped(test, axes, lambda fixtures: itertools.product(*axes.values()))

    return decorate


def looped(test, axes, combinations):
    """The test over ``combinations(fixtures)``, of values of the axes."""

    @functools.wraps(test)
    def run(**fixtures):
        for values in combinations(fixtures):
            case = dict(zip(axes, values, strict=True))
            try:
                test(**fixtures, **case)
            except Exception as error:
                text = ", ".join(f"{name}={value}" for name, value in case.items())
                raise AssertionError(f"with {text}: {type(error).__name__}: {error}") from error

    signature = inspect.signature(test)
    others = [p for name, p in signature.parameters.items() if name not in axes]
    run.__signature__ = signature.replace(parameters=others)
    return run
