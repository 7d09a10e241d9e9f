"""What must not change unseen: resolved configs of the recipes, and checkpoints of every format so far."""

import json
import shutil
import sys
from pathlib import Path

import jax
import pytest
from flax import linen as nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "goldens")]

import write  # noqa: E402

from jaxformer import checkpoint  # noqa: E402
from jaxformer.checkpoint import Checkpoints  # noqa: E402
from jaxformer.config import overrides  # noqa: E402
from jaxformer.models import build  # noqa: E402
from jaxformer.parallel import mesh as meshes  # noqa: E402
from jaxformer.train import optim, step  # noqa: E402

FORMATS = sorted(path.name for path in write.GOLDENS.glob("checkpoint-*"))


def test_every_recipe_resolves_to_its_golden_config():
    found = write.goldens()
    kept = {path.stem: path.read_text(encoding="utf-8") for path in (write.GOLDENS / "configs").glob("*.json")}
    changed = [name for name, recipe in found.items() if kept.get(name) != write.config(recipe)]
    changed += sorted(kept.keys() - found.keys())
    assert not changed, f"{changed}: not as committed; if so meant, run: python tests/goldens/write.py configs"


@pytest.mark.parametrize("name", FORMATS)
def test_checkpoints_of_every_format_are_restored(name, tmp_path):
    shutil.copytree(write.GOLDENS / name, tmp_path / "run")
    workdir = tmp_path / "run"
    digests = json.loads((workdir / "digests.json").read_text())
    assert write.digests(checkpoint.load_run(workdir).params) == digests
    config = overrides.read(workdir)
    module, mesh = build.build(config.model), meshes.make(config.mesh)
    schedule = optim.schedule(config.schedule, config.train.steps, build.model_width(config.model))
    shapes = nn.meta.unbox(build.shapes(module))["params"]
    optimizer = optim.optimizer(config.optimizer, schedule, shapes, build.logical_names(module))
    with jax.set_mesh(mesh):
        checkpoints = Checkpoints(workdir, config.checkpoint)
        saved = checkpoints.restore(step.abstract_state(config, module, optimizer, mesh))
        checkpoints.close()
    assert int(saved.state.step) == saved.about["step"] == 2
    assert write.digests(saved.state.variables["ema"]) == digests
    assert {"epoch", "block", "batch"} <= saved.data.keys()


SAPPHIRE = ("sse4_2", "avx", "avx2", "avx512vl", "avx512_vnni", "avx512_bf16", "amx_tile", "fma")


@pytest.mark.parametrize(
    ("cpu", "xla", "level"),
    [
        (SAPPHIRE, "", "amx"),
        (SAPPHIRE, "--a=1 --xla_cpu_max_isa=AVX2 --b=2", "avx2"),
        (SAPPHIRE, "--xla_cpu_max_isa=AVX2 --xla_cpu_max_isa=AVX512", "avx512"),
        (SAPPHIRE[:3], "", "avx2"),
        (SAPPHIRE[:3], "--xla_cpu_max_isa=AVX512", "avx2"),  # a cap adds nothing
        (SAPPHIRE[:3] + SAPPHIRE[5:6], "", "avx2"),  # nothing without the levels below
        ((), "", ""),
    ],
)
def test_the_instruction_set_is_the_processors_under_the_cap(cpu, xla, level):
    assert write.instruction_set(cpu, xla) == level


def test_kinds_of_processors_are_told_apart_within_an_instruction_set():
    first = "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 207\nmodel name\t: Xeon\n"
    assert write.processor(first + "\n" + first.replace("207", "143"), "amx") == "GenuineIntel 6/207 amx"
    assert write.processor("", "avx2") == "avx2"
    assert write.processor("Processor: ARMv8\n", "") == ""


def test_losses_are_kept_for_each_instruction_set_and_version_of_jax():
    runs = {"packed", "masked", "classes"}
    for version in ("0.10.2", "0.12.0.1"):
        for level in ("avx2", "avx512", "avx512_bf16", "amx"):
            kept = json.loads(write.losses_file(version, level).read_text())
            assert {key.split()[-1] for key in kept} <= write.INSTRUCTION_SETS.keys() and "amx" in kept
            assert all(losses.keys() == runs for losses in kept.values())
