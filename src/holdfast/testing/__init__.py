"""For tests of programs that use Holdfast, and of stores that plug into it.

`FakeClock` is time that a test moves. `holdfast.testing.conformance` is the suite that every store has to pass, and
`holdfast.testing.stateful` drives a store side by side with the memory store; these two need pytest and Hypothesis, so
they are imported by their own names.

`holdfast.testing.witness` writes down what clients and tasks saw, and `holdfast.testing.checker` judges by it whether
what a store holds came about rightly: for tests that kill processes and break connections.
"""

from holdfast.testing.clock import FakeClock

__all__ = ["FakeClock"]
