"""What Holdfast costs: `bench` measures this machine, `counts` counts what is the same on every machine."""
