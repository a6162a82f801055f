"""For tests of programs that use Holdfast, and of stores that plug into it.

`FakeClock` is time that a test moves. `holdfast.testing.conformance` is the suite that every store has to pass, and
`holdfast.testing.stateful` drives a store side by side with the memory store; these two need pytest and Hypothesis, so
they are imported by their own names.
"""

from holdfast.testing.clock import FakeClock

__all__ = ["FakeClock"]
