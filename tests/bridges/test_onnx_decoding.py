"""ONNX files of one decoding step, run by onnxruntime, against the model's own decoding. Refusals need no package."""

import dataclasses
import functools
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import builders
import jax
import numpy as np
import pytest
from builders import AttentionConfig, EncodingConfig, FeedForwardConfig, HeadConfig, NormConfig

from jaxformer import testing
from jaxformer.bridges import onnx_decoding
from jaxformer.config import Config, DecodeConfig, DeltaConfig, MoEConfig, TaskConfig
from jaxformer.decode.compiled import Vocabulary, forward
from jaxformer.decode.runner import Runner
from jaxformer.errors import ConfigError
from jaxformer.model import Model
from jaxformer.models import build

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "onnx" / "decode.py"
LENGTH, SOURCE, NEW, VOCAB = 16, 6, 10, 10  # of 13 rows of the embedding
GPT2 = builders.decoder(
    layers=1, encoding=EncodingConfig(kind="learned", max_length=LENGTH), attention=AttentionConfig(heads=2, bias=True)
)
LLAMA = builders.decoder(
    attention=AttentionConfig(heads=4, kv_heads=2, window=4, bias=False),
    ffn=FeedForwardConfig(width=16, activation="silu", gated=True),
    norm=NormConfig("rms"),
    unroll=1,
)
SEQ2SEQ = builders.seq2seq(layers=1)
UNTIED = HeadConfig(tied=False)  # a tied one, with random weights, repeats its input
MODELS = {
    "gpt2": dataclasses.replace(GPT2, head=UNTIED),
    "llama": dataclasses.replace(LLAMA, head=UNTIED),
    "seq2seq": dataclasses.replace(SEQ2SEQ, head=UNTIED),
}
PROMPTS = [[1, 2, 3], [4], [5, 6]]
SOURCES = [[3, 4], [5, 6, 7, 8, 9, 10], [11]]


class JaxSession:
    """The programs before conversion, with onnxruntime's calls, so that most is tested without the extra [onnx]."""

    programs: ClassVar[dict] = {}

    def __init__(self, path, options=None, providers=None):
        self.program = self.programs[Path(path)]
        self.run_program = jax.jit(self.program.function)

    def get_inputs(self):
        return [SimpleNamespace(name=name, shape=list(spec.shape)) for name, spec in self.program.inputs.items()]

    def get_outputs(self):
        return [SimpleNamespace(name=name) for name in self.program.outputs]

    def run(self, _, feed):
        assert set(feed) == set(self.program.inputs)
        arrays = [feed[name] for name in self.program.inputs]
        assert [x.dtype for x in arrays] == [spec.dtype for spec in self.program.inputs.values()]
        return [np.asarray(x) for x in self.run_program(*arrays)]


@functools.cache
def loaded(kind: str):
    """The example as a module, on one of the two runtimes."""
    if kind == "onnxruntime":
        runtime = pytest.importorskip("onnxruntime")
        pytest.importorskip("jax2onnx", reason="needs the extra [onnx]")
    else:
        runtime = SimpleNamespace(InferenceSession=JaxSession, SessionOptions=SimpleNamespace)
    spec = importlib.util.spec_from_file_location(f"onnx_decode_{kind}", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get("onnxruntime")
    sys.modules["onnxruntime"] = runtime
    try:
        spec.loader.exec_module(module)
    finally:
        sys.modules.pop("onnxruntime") if before is None else sys.modules.update(onnxruntime=before)
    return module


@pytest.fixture(scope="module", params=["jax", "onnxruntime"])
def script(request):
    return loaded(request.param)


@functools.cache
def exported(name: str, script, folder: Path) -> tuple[Path, Runner]:
    config = MODELS[name]
    module = build.build(config)
    variables = testing.random_variables(module, deviation=0.7)
    source_length = SOURCE if config.has_encoder else None
    tokenizers = SimpleNamespace(target=SimpleNamespace(size=VOCAB))
    model = Model(module, variables["params"], {}, Config(model=config), tokenizers)
    path = folder / script.__name__ / name / "step"
    if script is loaded("jax"):
        for file, program in onnx_decoding.programs(variables, config, LENGTH, source_length, vocab=VOCAB).items():
            JaxSession.programs[path / f"{file}.onnx"] = program
    else:
        assert model.export_onnx_step(path, LENGTH, source_length) == path
    return path, Runner(module, variables, Vocabulary(eos=(), pad=0, size=VOCAB))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("onnx")


@pytest.mark.parametrize("name", MODELS)
def test_ten_greedy_tokens_of_padded_prompts_are_the_models_own(name, script, folder):
    path, runner = exported(name, script, folder)
    sources = SOURCES if MODELS[name].has_encoder else None
    prompts = [{"target": prompt} for prompt in PROMPTS]
    if sources:
        prompts = [{**prompt, "source": source} for prompt, source in zip(prompts, sources)]
    want = runner.generate(prompts, DecodeConfig(method="greedy", max_length=NEW))
    got = script.decode(path, PROMPTS, NEW, sources=sources)
    assert got == [list(map(int, hypotheses[0].tokens)) for hypotheses in want]
    assert len({tuple(row) for row in got}) == len(got)  # rows differ, so none was read for another


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_each_step_are_those_of_the_whole_text(name, script, folder):
    path, runner = exported(name, script, folder)
    rng, steps = np.random.default_rng(0), 12
    batch = builders.batch(MODELS[name], [steps, steps], steps)
    tokens = np.asarray(batch.target.tokens)
    want = np.asarray(forward(runner.module, runner.variables, batch))
    step = script.load(path / "step.onnx")
    fixed = {}
    if batch.source is not None:
        lengths = [SOURCE, 2]
        source = builders.stream(rng, lengths, SOURCE)
        want = np.asarray(forward(runner.module, runner.variables, batch._replace(source=source)))
        rows = [list(map(int, row[:n])) for row, n in zip(np.asarray(source.tokens), lengths)]
        fixed = script.read_sources(path, rows)  # padded on the other side
    past = {i.name: np.zeros((2, *i.shape[1:]), np.float32) for i in step.get_inputs() if i.name.startswith("past.")}
    segment = np.zeros((2, LENGTH), np.int32)
    for index in range(steps):
        segment[:, index] = 1
        state = {"tokens": tokens[:, index : index + 1], "index": np.array(index, np.int32), "segment": segment}
        logits, *present = step.run(None, state | past | fixed)
        past = dict(zip(past, present))
        np.testing.assert_allclose(logits, want[:, index, :VOCAB], rtol=1e-4, atol=1e-4)


def test_the_files_and_the_names_of_inputs_and_outputs(script, folder):
    path, _ = exported("seq2seq", script, folder)
    if script is loaded("onnxruntime"):
        assert sorted(file.name for file in path.iterdir()) == ["source.onnx", "step.onnx"]
        assert [file.name for file in path.parent.iterdir()] == [path.name]
    step, source = script.load(path / "step.onnx"), script.load(path / "source.onnx")
    memory = ["memory.0.key", "memory.0.value"]
    names = ["tokens", "index", "segment", "past.0.key", "past.0.value", *memory, "source_segment"]
    assert [node.name for node in step.get_inputs()] == names
    assert [node.name for node in step.get_outputs()] == ["logits", "present.0.key", "present.0.value"]
    assert [node.name for node in source.get_outputs()] == memory
    assert [str(n) for n in step.get_inputs()[3].shape] == ["rows", "2", "4", str(LENGTH)]
    assert [str(n) for n in step.get_inputs()[4].shape] == ["rows", "2", str(LENGTH), "4"]


def test_the_script_by_itself(folder):
    script = loaded("onnxruntime")
    path, _ = exported("gpt2", loaded("onnxruntime"), folder)
    want = script.decode(path, [[1, 2, 3], [4]], 4)
    command = [
        sys.executable,
        "-I",
        str(SCRIPT),
        str(path),
        *["--prompt", "1", "2", "3", "--prompt", "4", "--new", "4"],
    ]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.stdout.splitlines() == [" ".join(map(str, row)) for row in want], found.stderr
    found = subprocess.run([*command[:-1], "40"], capture_output=True, text=True)
    assert found.returncode == 2 and "expected at most 14: the cache has 16 slots" in found.stderr
    stop = script.decode(path, [[1, 2, 3], [4]], 4, end=want[0][1])
    assert stop[0] == want[0][: want[0].index(want[0][1])]


def test_the_example_imports_neither_jax_nor_jaxformer():
    code = SCRIPT.read_text(encoding="utf-8")
    assert "import jax" not in code and "from jax" not in code


@pytest.mark.parametrize(
    ("edits", "options", "message"),
    [
        ({}, {"length": 0}, "got length 0, expected at least 1"),
        ({}, {"length": 4, "rows": 0}, "got rows 0, expected at least 1"),
        ({}, {"length": LENGTH + 1}, f"got length {LENGTH + 1}, expected at most the model's {LENGTH} positions"),
        ({}, {"length": 4, "source_length": 4}, "got source_length for a model without an encoder"),
        ({"dtype": "bfloat16"}, {"length": 4}, "computes in bfloat16, expected float32"),
        (dataclasses.asdict(SEQ2SEQ), {"length": 4}, "got no source_length, expected the slots of the encoder"),
        ({"decoder": None, "encoder": builders.stack()}, {"length": 4}, "got a model without a causal decoder"),
        ({"decoder": builders.stack(delta=DeltaConfig())}, {"length": 4}, "got layers of the gated delta rule"),
        ({"decoder": builders.stack(causal=False)}, {"length": 4}, "got a model without a causal decoder"),
    ],
)
def test_what_has_no_step_to_export_is_refused(edits, options, message, tmp_path):
    config = SEQ2SEQ if "encoder" in edits and edits.get("decoder") else dataclasses.replace(GPT2, **edits)
    with pytest.raises(ConfigError, match=message):
        onnx_decoding.export({}, config, tmp_path / "step", **options)
    assert not list(tmp_path.iterdir())


def test_a_model_whose_prompts_see_ahead_is_refused(tmp_path):
    module = build.build(GPT2)
    model = Model(module, {}, {}, Config(model=GPT2, task=TaskConfig(name="prefix_lm")), None)
    with pytest.raises(ConfigError, match="task prefix_lm, whose prompts see their own future"):
        model.export_onnx_step(tmp_path / "step", 4)


def test_a_folder_that_exists_is_not_written_to(tmp_path):
    with pytest.raises(ConfigError, match="which exists, expected a new file"):
        onnx_decoding.export({}, GPT2, tmp_path, 4)


def test_an_operation_without_an_onnx_form_is_named(tmp_path):
    pytest.importorskip("jax2onnx", reason="needs the extra [onnx]")
    config = builders.decoder(layers=1, moe=MoEConfig(experts=2, top_k=1))
    _, variables = builders.make(config)
    with pytest.raises(ConfigError, match="jax2onnx cannot convert"):
        onnx_decoding.export(variables, config, tmp_path / "new" / "step", 4)
    assert not list(tmp_path.iterdir())
