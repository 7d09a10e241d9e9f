"""Runs with kept programs in one process, which has one device. Prints JSON: name -> what was seen.

A start forgets what this process has traced and compiled; the folder of kept programs stays.
"""

import dataclasses
import hashlib
import json
import pathlib
import sys

import jax

from jaxformer.checkpoint import reading
from jaxformer.config import (
    Config,
    DataConfig,
    EmbedConfig,
    EncodingConfig,
    EvaluateConfig,
    ModelConfig,
    ScheduleConfig,
    StackConfig,
    TaskConfig,
    TokenizerConfig,
    TrainConfig,
)
from jaxformer.decode.compiled import CompiledDecoder
from jaxformer.hf import workdirs
from jaxformer.models import build
from jaxformer.models.transformer import Transformer
from jaxformer.runtime import compilation, programs
from jaxformer.train import loop

HOME = pathlib.Path(sys.argv[1])
compilation.ready_directory = HOME
SEEN = {}
traced = []
run_stacks, step = Transformer.run_stacks, Transformer.step
Transformer.run_stacks = lambda self, *args, **kwargs: traced.append(0) or run_stacks(self, *args, **kwargs)
Transformer.step = lambda self, *args, **kwargs: traced.append(0) or step(self, *args, **kwargs)

STACK = StackConfig(layers=1, width=8, embed=EmbedConfig(), encoding=EncodingConfig(kind="rope"))
CONFIG = Config(
    model=ModelConfig(encoder=STACK, decoder=STACK, share_embeddings=True),
    task=TaskConfig(name="translation"),
    data=DataConfig(
        source="algorithmic",
        name="reverse",
        length=16,
        batch=4,
        cache=str(HOME),
        tokenizer=TokenizerConfig(kind="byte"),
    ),
    schedule=ScheduleConfig(kind="constant", warmup=0),
    train=TrainConfig(steps=2, evaluate_every=2, trackers=()),
    evaluate=EvaluateConfig(examples=4, decode_examples=0, samples=0),
)


def start(keeps=True):
    """Forgets all that a new process would not know."""
    programs.trusted_folder = folder if keeps else lambda: None
    build._shapes.cache_clear()
    build._initialiser.cache_clear()
    for name in vars(CompiledDecoder):
        if isinstance(vars(CompiledDecoder)[name], programs.KeptFunction):
            vars(CompiledDecoder)[name]._programs.clear()
    jax.clear_caches()
    traced.clear()


def train(name, config=CONFIG, keeps=True):
    """A hash of the trained parameters, and whether the model was traced."""
    start(keeps)
    assert loop.train(config, HOME / name) == 0
    weights = reading.read_weights(HOME / name / "checkpoints" / "last" / str(config.train.steps))
    leaves = jax.tree.leaves(weights.params)
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest(), bool(traced)


folder = programs.trusted_folder
first, again, plain = train("first"), train("again"), train("plain", keeps=False)
SEEN["trained"] = [first[0] == again[0] == plain[0], first[1], again[1], plain[1]]

LINES = ["1 2 3", "4 5 6 7 8 1 2 3", ""]
found = []
for keeps in (True, True, False):
    start(keeps)
    model = workdirs.load(HOME / "first")
    decode = dataclasses.replace(model.config.decode, max_length=6, method="beam", beams=3, weights="int8")
    found.append([str(each) for each in model.outputs(LINES, decode)])
    found[-1].append(bool(traced))
*outputs, was_traced = zip(*found, strict=True)
SEEN["beams"] = [all(len(set(each)) == 1 for each in outputs), *was_traced]
print(json.dumps(SEEN))
