"""Ways to execute a sweep. Each file defines two functions.

`check(plan, workers)` raises `ConfigError` for a plan that it cannot execute, before anything is written.
`execute(plan, workers)` returns the exit code.
"""
