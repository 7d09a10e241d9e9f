"""Ways to execute a sweep. Each file defines `execute(plan, workers)`, which returns the exit code."""
