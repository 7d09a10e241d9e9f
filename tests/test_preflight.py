"""Comparison of the facts that processes report. Two real processes meet in parallel/test_distributed.py."""

from __future__ import annotations

import dataclasses

import pytest

from jaxformer import preflight
from jaxformer.config import ConfigError, StackConfig, overrides
from jaxformer.config.overrides import section
from jaxformer.parallel import distributed


@pytest.fixture
def config():
    made = overrides.defaults()
    made.data.source, made.data.name, made.data.examples = "numerals", "fr", 50
    made.data.batch = 16
    made.model.encoder = section(StackConfig, layers=1, width=16)
    made.model.decoder = section(StackConfig, layers=1, width=16)
    return overrides.freeze(made)


@pytest.fixture
def meet(monkeypatch):
    """The findings when other processes report what `others` makes of this one's facts."""

    def run(config, others, devices=None):
        monkeypatch.setattr(distributed, "all_gather_host_value", lambda name, own, seconds: [own, *others(own)])
        return {found.name: found for found in preflight.compare_processes(config, devices, 1.0)}

    return run


def test_alone(meet):
    found = meet(None, lambda own: [], devices=8)
    assert found["processes"].message == "1, this is number 0"
    assert found["device count"].level == "ok"
    assert set(found) == {"processes", "device count"}


def test_two_that_belong_together(meet, config):
    def other(own):
        return [own | {"host": "b", "data": own["data"] | {"rows": [8, 16]}}]

    def halved(own):
        own["local"], own["data"] = 4, own["data"] | {"rows": [0, 8]}
        return other(own)

    found = meet(config, halved)
    assert {each.level for each in found.values()} == {"ok"}, found
    assert "on 2 hosts" in found["processes"].message
    assert found["device count"].message == "8, 4 a process; mesh data 8"
    assert "own 8 rows" in found["data"].message


@pytest.mark.parametrize(
    ("fact", "value", "name", "words"),
    [
        ("code", "0.2", "same code", "0.2 on 1; bring the same version"),
        ("config", "other", "same config", "other on 1; start all processes"),
        ("jax", "1/1", "same jax", "1/1 on 1; install the same"),
        ("local", 2, "devices a process", "2 on 1"),
        ("kind", "TPU", "kind of device", "TPU on 1"),
        ("devices", 4, "devices in all", "4 on 1"),
        ("data", {"error": "data.dir: got nothing"}, "data", "data.dir: got nothing (on 1)"),
    ],
)
def test_who_differs_is_named(fact, value, name, words, meet, config):
    found = meet(config, lambda own: [own | {fact: value}])[name]
    assert found.level == "FAIL"
    assert words in found.message


def test_data_that_differs_or_is_read_twice(meet, config):
    assert "copy it again" in meet(config, lambda own: [own | {"data": own["data"] | {"content": "x"}}])["data"].message
    assert "expected each once" in meet(config, lambda own: [own])["data"].message


def test_processes_that_hold_the_same_rows_read_the_same(meet, config):
    def both(own):
        own["data"]["readers"] = 2
        return [own]

    assert "every 2 processes read the same 16 rows" in meet(config, both)["data"].message
    found = meet(config, lambda own: [*both(own), own])["data"]
    assert "got rows 0 to 16 by 3 of a batch, expected each by 2 processes" in found.message


def test_rows_are_those_of_the_run_itself(meet, config):
    """A pipeline's microbatches divide the rows too."""
    staged = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, data=-1, stage=2))
    found = meet(staged, lambda own: [])
    assert found["device count"].message == "8, 8 a process; mesh stage 2 x data 4"
    assert preflight.data_share(staged)["rows"] == [0, 16]
    odd = dataclasses.replace(staged, data=dataclasses.replace(staged.data, batch=12))
    assert preflight.data_share(odd)["rows"] == [0, 8]


def test_slices_that_are_missing(meet, config):
    slices = dataclasses.replace(config.mesh, dcn=dataclasses.replace(config.mesh.dcn, data=2))
    found = meet(dataclasses.replace(config, mesh=slices), lambda own: [])
    assert "config.mesh.dcn: got data 2, expected a product of 1 slices" in found["config"].message


def test_devices_that_are_missing(meet, config):
    assert "got 8, expected 16" in meet(None, lambda own: [], devices=16)["device count"].message
    assert "were not joined" in meet(None, lambda own: [own])["device count"].message
    mesh = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, tensor=3))
    assert "expected a product of 8" in meet(mesh, lambda own: [])["config"].message


def test_a_process_that_stalls(monkeypatch):
    def stalled(name, own, seconds):
        raise distributed.BarrierTimeout("barrier 'preflight': got 1 of 2")

    monkeypatch.setattr(distributed, "all_gather_host_value", stalled)
    (found,) = preflight.compare_processes(None, None, 1.0)
    assert (found.level, found.name) == ("FAIL", "processes")


def test_a_run_refuses_to_start_with_other_code(monkeypatch, config):
    monkeypatch.setattr(distributed, "all_gather_host_value", lambda name, own, seconds: [own, own | {"code": "0.2"}])
    with pytest.raises(ConfigError, match=r"code: got .* and 0.2 on 1, expected one for all processes; bring"):
        preflight.check_processes_agree(config)


def test_the_digest_of_the_code_is_that_of_its_files():
    assert preflight.code_digest() == preflight.code_digest()
    assert len(preflight.code_digest()) == 12
