"""Tiny random checkpoints of the other library with its own outputs: ours must be the same to rounding.

Skipped without the checkpoints. Everything is compared at unmasked positions. By default one checkpoint of each
architecture is compared, with one search; `GOLDENS=all` (`make goldens`) compares all of them in everything they hold.
"""

import functools
import json
import os
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import jaxformer
from jaxformer.hf import convert, reading

GOLDENS = Path(__file__).resolve().parents[2].parent / "shared" / "hf_goldens"
ALL = os.environ.get("GOLDENS") == "all"
FEW = {"gpt2_lm", "llama_gqa_llama3rope", "bert_mlm", "roberta_mlm", "deberta_v3_seqcls", "xlnet_lm", "t5_v1_1", "bart"}
NAMES = sorted(path.parent.name for path in GOLDENS.glob("*/expected.npz") if ALL or path.parent.name in FEW)
pytestmark = pytest.mark.skipif(not NAMES, reason="no golden checkpoints beside the project")


class Golden:
    def __init__(self, name):
        self.name = name
        self.model = jaxformer.from_pretrained(GOLDENS / name)
        self.arrays = np.load(GOLDENS / name / "expected.npz")
        self.run = functools.cache(self.run)

    def part(self, prefix):
        return {k.removeprefix(prefix): self.arrays[k] for k in self.arrays.files if k.startswith(prefix)}

    def inputs(self, case):
        inputs = self.part(f"{case}/in/")
        if case == "mems_seg2":  # what follows the first segment, with its memories
            inputs["mems"] = list(self.part("mems_seg1/out/mems/").values())
        return inputs

    def run(self, case):
        """Outputs of a case, and the gradient of its loss where one is known: one program of both."""

        def call(params, inputs):
            out = dict(self.model(**inputs, params=params, output_hidden_states=True))
            return out.get("loss"), out

        graded = f"{case}/grad_norm_global" in self.arrays.files
        program = jax.jit(jax.value_and_grad(call, has_aux=True) if graded else lambda *given: (call(*given), None))
        (_, out), gradients = program(self.model.params, self.inputs(case))
        return out, gradients


loaded: dict[str, Golden] = {}


@pytest.fixture
def golden(request):
    if request.param not in loaded:
        if ALL:
            loaded.clear()  # one checkpoint at a time
        loaded[request.param] = Golden(request.param)
    return loaded[request.param]


def every(condition):
    found = []
    for name in NAMES:
        arrays = np.load(GOLDENS / name / "expected.npz").files
        found += [pytest.param(name, case, id=f"{name}-{case}") for case in condition(name, arrays)]
    return found


def forward_cases(name, arrays):
    cases = sorted({k.split("/")[0] for k in arrays if k.split("/")[1] == "out"})
    return cases if ALL else [case for case in cases if case in ("pad", "twostream", "leftpad")]


def generation_cases(name, arrays):
    # XLNet's generation from memories is another function than the one that is defined, and not offered.
    cases = sorted({k.split("/")[1] for k in arrays if k.startswith("gen/") and "mems" not in k})
    # One search each: T5 under constraints, the others without.
    few = "extra_beam4_constrained" if name == "t5_v1_1" else "beam4_lp0.6_esFalse"
    return cases if ALL else [case for case in cases if case == few]


def close(got, expected, mask=None, rtol=2e-5, what=""):
    """Equal to `rtol` of the expected values' own size; rows behind padding are not compared."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, what
    if mask is not None and got.shape[: mask.ndim] == mask.shape:
        got, expected = got[mask != 0], expected[mask != 0]
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(got, expected, rtol=rtol, atol=rtol * scale, err_msg=what)


def mask_of(name, inputs):
    decoder = name.startswith("decoder_") or (name in ("logits",) and "decoder_input_ids" in inputs)
    key = "decoder_attention_mask" if decoder else "attention_mask"
    if "input_mask" in inputs:
        return 1 - inputs["input_mask"]
    return inputs.get(key)


@pytest.mark.parametrize(("golden", "case"), every(forward_cases), indirect=["golden"])
def test_outputs(golden, case):
    inputs, expected = golden.inputs(case), golden.part(f"{case}/out/")
    out, _ = golden.run(case)
    assert set(out) >= {name.split("/")[0] for name in expected}
    for name, value in expected.items():
        key, _, index = name.partition("/")
        got = out[key][int(index)] if index else out[key]
        mask = mask_of(key, inputs)
        close(got, value, None if key in ("loss", "mems") else mask, what=f"{golden.name} {case} {name}")
    states = [key for key in expected if "hidden_states/" in key and "encoder" not in key]
    if states:
        key = states[0].split("/")[0]
        assert len(out[key]) == len(states)


def with_gradients(name, arrays):
    cases = sorted({k.split("/")[0] for k in arrays if "/grad_norm_global" in k and not k.startswith("train/")})
    return cases if ALL or "twostream" not in cases else ["twostream"]  # both streams of XLNet, as it is trained


@pytest.mark.parametrize(("golden", "case"), every(with_gradients), indirect=["golden"])
def test_gradients(golden, case):
    model, (_, grads) = golden.model, golden.run(case)
    theirs = convert.export_gradients(model.hf.family.rows(model.config.model, model.hf.head), grads)
    norms = golden.part(f"{case}/grad_norm/")
    for name, value in norms.items():
        # A key bias has a gradient of zero but for rounding: it shifts all scores of a query alike.
        close(np.linalg.norm(theirs[name]), value, rtol=5e-5, what=f"{golden.name} {case} |{name}|")
    for name, value in golden.part(f"{case}/grad/").items():
        close(theirs[name], value, rtol=5e-5, what=f"{golden.name} {case} {name}")
    squares = sum(float(np.sum(np.square(theirs[name].astype(np.float64)))) for name in norms)
    close(np.sqrt(squares), golden.arrays[f"{case}/grad_norm_global"], rtol=5e-5)


@pytest.mark.parametrize(("golden", "case"), every(generation_cases), indirect=["golden"])
def test_generation(golden, case):
    found = golden.part(f"gen/{case}/")
    arguments = json.loads(str(found["args"]))
    inputs = {name.removeprefix("in/"): value for name, value in found.items() if name.startswith("in/")}
    out = golden.model.generate(**inputs, **arguments, return_dict_in_generate=True)
    np.testing.assert_array_equal(out.sequences, found["sequences"], err_msg=f"{golden.name} {case}")
    if "sequences_scores" in found:
        np.testing.assert_allclose(out.sequences_scores, found["sequences_scores"], atol=1e-4)


def with_training(name, arrays):
    return ["train"] if "train/loss" in arrays and (ALL or name == "gpt2_lm") else []


@pytest.mark.parametrize(("golden", "case"), every(with_training), indirect=["golden"])
def test_training_trace(golden, case):
    """Twenty AdamW steps from these weights: losses and gradient norms to 1e-4."""
    model, arrays = golden.model, golden.arrays
    optimizer = optax.adamw(1e-3, 0.9, 0.95, eps=1e-8, weight_decay=0.1)
    batches = [golden.part(f"train/in/{i}/") for i in range(4)]

    @jax.jit
    def step(params, state, inputs):
        loss, grads = jax.value_and_grad(lambda p: model(**inputs, params=p).loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, optax.global_norm(grads)

    params, state = model.params, optimizer.init(model.params)
    losses, norms = [], []
    for i in range(20):
        params, state, loss, norm = step(params, state, batches[i % 4])
        losses.append(float(loss))
        norms.append(float(norm))
    np.testing.assert_allclose(losses, arrays["train/loss"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(norms, arrays["train/grad_norm_global"], rtol=2e-4, atol=1e-4)
    theirs = convert.export_gradients(model.hf.family.rows(model.config.model, model.hf.head), params)
    for name, value in golden.part("train/final_param/").items():
        if not name.endswith(("key.bias", "c_attn.bias")):
            close(theirs[name], value, rtol=1e-3, what=name)


@pytest.mark.parametrize("name", NAMES)
def test_written_back_byte_for_byte(name, tmp_path):
    model = (loaded[name] if name in loaded else Golden(name)).model
    before, after = reading.open_tensors(GOLDENS / name), tmp_path / "out"
    stored = {tensor.dtype for tensor in before.values() if tensor.dtype.kind not in "iub"}
    model.save_pretrained(after, dtype=stored.pop() if len(stored) == 1 else None)
    again = reading.open_tensors(after)
    kept = convert.canonical_tensors(model.hf.family, before)
    for new, tensor in convert.canonical_tensors(model.hf.family, again).items():
        if new in kept:
            assert tensor.array().tobytes() == kept[new].array().tobytes(), new
    assert set(kept) - set(convert.canonical_tensors(model.hf.family, again)) <= {
        model.hf.family.tied_tensors and model.hf.family.tied_tensors[0]
    }
    config = {k: v for k, v in reading.read_config(after).items()}
    for key, value in reading.read_config(GOLDENS / name).items():
        assert config[key] == value, key
    second = jaxformer.from_pretrained(after)
    assert second.config.model == model.config.model
    jax.tree.map(np.testing.assert_array_equal, second.params, model.params)
