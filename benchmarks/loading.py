"""Loading a large random LLaMA checkpoint: seconds and peak host memory, beside the other library.

    python benchmarks/loading.py [--gigabytes=1] [--rounds=3] [--output=FILE.jsonl]

Needs the extra [bench] (torch, transformers). Each load is a fresh process; the two take turns, the file stays in the
page cache, and imports are not timed. Every parameter is read once after loading, since a loader may only map the file.
Memory is the peak resident set of the process less what it was after the imports, so mapped pages count in both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from jaxformer.hf import writing

OURS = """
import jaxformer, jax, numpy
from jaxformer.hf import pretrained
load = lambda: jaxformer.from_pretrained(DIRECTORY).params
read = lambda params: [float(numpy.asarray(x).ravel().sum()) for x in jax.tree.leaves(params)]
"""
THEIRS = """
import torch, transformers
from transformers import LlamaForCausalLM
load = lambda: LlamaForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32)
read = lambda model: [float(x.detach().sum()) for x in model.parameters()]
"""
MEASURE = """
import json, resource, time
def resident(what):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(what)) / 1024
before, begun = resident("VmRSS"), time.perf_counter()
model = load()
read(model)
print(json.dumps({"seconds": time.perf_counter() - begun, "peak_mb": resident("VmHWM") - before}))
"""


def checkpoint(place: Path, gigabytes: float) -> None:
    """A float32 LLaMA whose tensors fill `gigabytes`."""
    width, inner, vocab = 1024, 2816, 32000
    layer = 4 * width * width + 3 * width * inner + 2 * width
    layers = max(1, round((gigabytes * 1e9 / 4 - vocab * width) / layer))
    rng = np.random.default_rng(0)
    make = lambda *shape: lambda: rng.standard_normal(shape, np.float32) * 0.02  # noqa: E731
    tensors = {"model.embed_tokens.weight": make(vocab, width), "model.norm.weight": make(width)}
    for i in range(layers):
        base = f"model.layers.{i}"
        tensors |= {f"{base}.self_attn.{name}_proj.weight": make(width, width) for name in "qkvo"}
        tensors |= {f"{base}.mlp.{name}_proj.weight": make(inner, width) for name in ("gate", "up")}
        tensors |= {f"{base}.mlp.down_proj.weight": make(width, inner)}
        tensors |= {f"{base}.{name}_layernorm.weight": make(width) for name in ("input", "post_attention")}
    settings = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64, "intermediate_size": inner,
        "vocab_size": vocab, "tie_word_embeddings": True, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "hidden_act": "silu",
    }  # fmt: skip
    writing.write_checkpoint(place, settings, tensors)


def measure(program: str, place: Path) -> dict[str, float]:
    code = f"DIRECTORY = {str(place)!r}\n{program}\n{MEASURE}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", default="")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "llama"
        checkpoint(place, arguments.gigabytes)
        size = (place / "model.safetensors").stat().st_size / 2**20
        found: dict[str, list[dict[str, float]]] = {"jaxformer": [], "transformers": []}
        for round_ in range(arguments.rounds + 1):
            for name, program in (("jaxformer", OURS), ("transformers", THEIRS))[:: 1 if round_ % 2 else -1]:
                row = measure(program, place)
                if round_:  # the first fills the page cache
                    found[name].append(row)
    medians = {n: {k: statistics.median(r[k] for r in rows) for k in rows[0]} for n, rows in found.items()}
    for name, row in medians.items():
        print(f"{name:<14}{row['seconds']:8.2f} s   peak {row['peak_mb']:8.0f} MB   (file {size:.0f} MB)")
    ratio = {k: medians["jaxformer"][k] / medians["transformers"][k] for k in ("seconds", "peak_mb")}
    print(f"ratio         {ratio['seconds']:8.2f}          {ratio['peak_mb']:8.2f}")
    if arguments.output:
        with Path(arguments.output).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"file_mb": size, **medians, "ratio": ratio}) + "\n")


if __name__ == "__main__":
    main()
