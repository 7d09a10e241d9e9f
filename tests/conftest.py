"""The tests' process, before anything imports jax: see environment.py and shapes.py."""

import gc
from pathlib import Path

import environment
import pytest
import shapes

environment.prepare()
environment.share_contexts()
environment.trace_lightly()
# Tracing makes millions of objects that live on: looking through them for garbage is a tenth of the time.
gc.set_threshold(100_000, 50, 100)
shapes.install()

LONG = (
    "test_notebooks.py",
    "test_experiments.py",
    "test_docs.py",
    "test_external_modules.py",
    "test_cropped_context.py",
    "test_generate.py",
    "test_distributed.py",
    "test_benchmarks.py",
    "test_loop.py",
    "test_moe_step.py",
    "test_data_guide.py",
)
"""Files with tests of five seconds and more."""


SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text(encoding="utf-8").splitlines())
"""What `make test` leaves to `make test-all`: a test with all of its cases, or one case."""


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by the marks
def pytest_collection_modifyitems(config, items):
    """Marks the slow tests, and moves the long ones to the front where processes share the tests.

    What is left at the end is then short, and no process waits long.
    """
    for item in items:
        if SLOW & {item.nodeid, item.nodeid.partition("[")[0]}:
            item.add_marker("slow")
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.path.name not in LONG)


def pytest_runtest_teardown(item, nextitem):
    """Looks after every file whether its programs have become too many for one process."""
    if nextitem is not None and nextitem.path != item.path:
        environment.release_programs()


@pytest.hookimpl(trylast=True)  # after the processes that share the tests have ended
def pytest_sessionfinish(session, exitstatus):
    """Keeps the compiled programs of a session that came to its end; of another, some may be half-written."""
    environment.skip_cleanup()
    gc.freeze()  # pytest looks through all objects for garbage, five times: a minute among those of all tests
    if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not hasattr(session.config, "workerinput"):
        environment.keep_programs()


@pytest.fixture
def rolled(monkeypatch) -> None:
    """Layers whose number is left to the package run in a loop, as on accelerators: unrolled ones compile longer."""
    from jaxformer.nn import stack

    monkeypatch.setattr(stack, "MAX_UNROLLED", 1)


@pytest.fixture(scope="module")
def programs() -> dict:
    """The compiled steps of a module's runs, for `shared_programs`."""
    return {}


@pytest.fixture
def shared_programs(programs, monkeypatch) -> None:
    """Runs of one config in a module compile their programs once, and not at every start anew."""
    import builders

    builders.share_programs(monkeypatch, programs)
