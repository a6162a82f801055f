# Everything a person needs to know is in `make help`. Each target sets itself up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ORDER := $(or $(ORDER),$(shell date +%s))
# The tests start thousands of processes: without stored bytecode each compiles all of Holdfast, in three times the time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help screenshots demo test test-world test-world-kills quick shuffled planted faults fuzz torture check format bench bench-scale bench-neighbour bench-recovery bench-schedules bench-streams bench-sustained bench-workflows bench-hooks bench-world bench-world-node bench-against bench-observed bench-monitor check-perf docs diagram clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | awk -F'\t' '{printf "  make %-16s %s\n", $$1, $$2}'

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Holdfast needs Python 3.11 or newer; '$(PYTHON)' is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(READY)  ## run the main job on SQLite and see what happened
	@$(BIN)/python examples/demo.py

test: check check-perf  ## everything: style, types, all tests, performance counts
	$(BIN)/python -m pytest -n 3 --dist loadgroup --durations=8

quick: $(READY)  ## the inner loop: everything that is fast
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'not slow and not torture and not faults' -x

shuffled: $(READY)  ## the inner loop in a random order; repeat one with make shuffled ORDER=7
	@echo "in the order of ORDER=$(ORDER)"
	HOLDFAST_TEST_ORDER=$(ORDER) $(BIN)/python -m pytest -n 2 --dist loadgroup -m 'not slow and not torture and not faults' $(TESTS)

test-world: $(READY)  ## the package for Node, and the suite of Workflow DevKit on both stores (Node 20; 4 minutes)
	$(BIN)/python -m tests.node

test-world-kills: $(READY)  ## the suite of Workflow DevKit while servers are killed (Node 20; 3 minutes); SEED=7 repeats
	$(BIN)/python -m tests.node kills

planted: $(READY)  ## plant bugs one by one in a copy of the source, and see which the tests catch (10 minutes)
	$(BIN)/python -m tests.planted --jobs 2

faults: $(READY)  ## every crash point in every role on both stores, damaged records, MongoDB of every kind (10 minutes)
	$(BIN)/python -m pytest -m 'faults and not torture' -n 2 --dist loadgroup --durations=8

fuzz: $(READY)  ## 100,000 requests of every kind to the API and the pages (15 minutes; FUZZ="--requests 5000 --seed 7")
	$(BIN)/python -W ignore -m tests.fuzz $(FUZZ)

torture: $(READY)  ## minutes of faults on a real replica set (HOLDFAST_TEST_TORTURE_SECONDS=600 for longer)
	$(BIN)/python -m pytest -m torture -n 0 -s --durations=0

check: $(READY)  ## ruff, the formatter's check, mypy strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## let ruff format and fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## measure this machine: rates, latencies, idle cost, and the closest neighbour beside it
	$(BIN)/python -m benchmarks.bench
	$(BIN)/python -m benchmarks.neighbour

bench-scale: $(READY)  ## claim, submit, list beside 1,000,000 ended and 200,000 waiting; 16 claimers against 1 (10 minutes)
	$(BIN)/python -m benchmarks.scale

bench-neighbour: $(READY)  ## pynenc on the same MongoDB in the same run, as a ratio (needs Python 3.12)
	$(BIN)/python -m benchmarks.neighbour

bench-recovery: $(READY)  ## kill -9 runners and workers, and measure how long their work waits
	$(BIN)/python -m benchmarks.recovery

bench-schedules: $(READY)  ## how soon ticks and triggers call, with real runners (6 minutes)
	$(BIN)/python -m benchmarks.schedules

bench-sustained: $(READY)  ## full rate through one queue for 10 minutes on each store: does it slow down?
	$(BIN)/python -m benchmarks.sustained

bench-streams: $(READY)  ## chunks per second, how soon readers see them, long streams, 200 readers (5 minutes)
	$(BIN)/python -m benchmarks.streams

bench-workflows: $(READY)  ## steps per second, replay, sleeping runs, beside lone inserts (5 minutes)
	$(BIN)/python -m benchmarks.workflows

bench-hooks: $(READY)  ## from resume to the next line of a body; 10,000 runs that wait (10 minutes)
	$(BIN)/python -m benchmarks.hooks

bench-world: $(READY)  ## events per second of World runs, and whether long runs are slower (2 minutes)
	$(BIN)/python -m benchmarks.world

bench-world-node: $(READY)  ## the World as Node sees it; the suite beside the vendor's own World (5 minutes)
	$(BIN)/python -m tests.node figures

bench-against: $(READY)  ## this tree and an earlier commit in turns, as ratios: make bench-against COMMIT=9c0019a
	$(BIN)/python -m benchmarks.against $(COMMIT)

bench-observed: $(READY)  ## what metrics and tracing cost a drain, in turns with one without (1 minute)
	$(BIN)/python -m benchmarks.observed

bench-monitor: $(READY)  ## pages beside a million invocations, a watched drain, 200 clients of the live feed (15 minutes)
	$(BIN)/python -m benchmarks.monitor

check-perf: $(READY)  ## count what does not depend on the machine; fails at +10 %
	$(BIN)/python -m benchmarks.counts --check

screenshots: $(READY)  ## draw the pictures of README and docs anew (needs chromium)
	$(BIN)/python -m tests.browser.pictures

docs: $(READY)  ## write the pages of the reference that are made from the code
	$(BIN)/python -m tests.docs.reference

diagram: $(READY)  ## render the state machine into the docs
	$(BIN)/holdfast status render --format svg --output docs/reference/state-machine.svg
	$(BIN)/holdfast status render --format mermaid --output docs/reference/state-machine.mmd

clean:  ## remove what was built
	rm -rf $(VENV) .venv-neighbour build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
