"""For tests of programs that use Holdfast, and of stores that plug into it.

`testing_app` puts an app on a store in memory, where a test runs what is due and sees what was submitted; the fixtures
`holdfast_app` and `holdfast_testing` do so for pytest. `FakeClock` is time that a test moves.

`holdfast.testing.conformance` is the suite that every store has to pass, and `holdfast.testing.stateful` drives a store
side by side with the memory store; these two need pytest and Hypothesis, so they are imported by their own names.

`holdfast.testing.witness` writes down what clients and tasks saw, and `holdfast.testing.checker` judges by it whether
what a store holds came about rightly: for tests that kill processes and break connections.
"""

from holdfast.testing.clock import FakeClock
from holdfast.testing.harness import Endless, Harness, testing_app
from holdfast.testing.report import Ran, Report
from holdfast.testing.submitted import Submitted

__all__ = ["Endless", "FakeClock", "Harness", "Ran", "Report", "Submitted", "testing_app"]
