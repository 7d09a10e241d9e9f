"""Programs that several starts of one run share."""

from __future__ import annotations

import pytest
from jax.sharding import Mesh

from jaxformer.train import step


@pytest.fixture(scope="module")
def programs() -> dict:
    return {}


@pytest.fixture
def shared_programs(programs, monkeypatch) -> None:
    """Runs of one config in a module compile what they train and measure with once, and not at every start anew.

    What the programs are made of beside the config follows from it. That a resumed run makes the same ones is
    `test_loop.py::test_stopped_and_resumed_is_the_uninterrupted_run`, which does not share them.
    """

    def share(name: str) -> None:
        make = getattr(step, name)

        def made(config, module, *rest):
            key = name, repr(config), repr(module), *(part for part in rest if isinstance(part, Mesh))
            if key not in programs:
                programs[key] = make(config, module, *rest)
            return programs[key]

        monkeypatch.setattr(step, name, made)

    share("make_train_step")
    share("make_eval_step")
