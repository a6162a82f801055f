"""Help to test programs that use Holdfast, and stores that plug into it.

`testing_app` puts an app on a store in memory: a test runs what is due and sees what was submitted. The fixtures
`holdfast_app` and `holdfast_testing` do so for pytest. `FakeClock` is time that a test moves.

`holdfast.testing.conformance` is the suite that every store has to pass. `holdfast.testing.stateful` drives a store
side by side with the memory store. They need pytest and Hypothesis, so they are imported by their own names.
"""

from holdfast.testing.clock import FakeClock
from holdfast.testing.harness import Endless, Harness, testing_app
from holdfast.testing.report import Ran, RanStep, Report
from holdfast.testing.submitted import Submitted

__all__ = ["Endless", "FakeClock", "Harness", "Ran", "RanStep", "Report", "Submitted", "testing_app"]
