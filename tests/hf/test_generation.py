"""`generate` against what the other library returned for tiny random models (see `write_generation.py`)."""

import json
import logging
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxformer
from jaxformer.config import ConfigError
from jaxformer.hf import generation

PLACE = Path(__file__).parent / "generation"
CASES = json.loads((PLACE / "cases.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Opens each model once, and once more with each set of files that a case wants beside it."""
    kept = {}

    def load(name, changed=None):
        key = (name, json.dumps(changed, sort_keys=True))
        if key not in kept:
            place = tmp_path_factory.mktemp("generation") / name
            shutil.copytree(PLACE / name, place)
            for file, values in (changed or {}).items():
                path = place / {"config": "config.json", "generation": "generation_config.json"}[file]
                before = json.loads(path.read_text()) if path.exists() else {}
                path.write_text(json.dumps(before | values))
            kept[key] = jaxformer.from_pretrained(place)
        return kept[key]

    return load


@pytest.mark.parametrize("case", CASES, ids=[f"{case['model']}-{case['name']}" for case in CASES])
def test_the_same_sequences_and_scores_as_the_other_library(models, case):
    model = models(case["model"], case.get("files"))
    inputs = {name: np.asarray(value) for name, value in case["in"].items()}
    out = model.generate(**inputs, **case["args"], return_dict_in_generate=True)
    assert out.sequences.tolist() == case["sequences"]
    if "scores" in case:
        np.testing.assert_allclose(out.sequences_scores, case["scores"], atol=2e-5)
