"""Bridges whose package is not installed can be imported, and say on use what to install."""

import importlib

import pytest

from jaxformer.bridges import lm_eval, onnx
from jaxformer.errors import ConfigError


def test_a_model_of_the_harness_without_the_harness(monkeypatch):
    monkeypatch.setattr(lm_eval, "windows", None)
    with pytest.raises(ConfigError, match=r"got no package lm_eval, .*jaxformer\[harness\]"):
        lm_eval.HarnessModel(None)


def test_an_export_to_onnx_without_its_packages(monkeypatch):
    def missing(name):
        raise ImportError(name=name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"got no package jax2onnx, .*jaxformer\[onnx\]"):
        onnx.converter("export_onnx")
