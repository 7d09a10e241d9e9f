"""Loading and saving a large random LLaMA checkpoint: seconds and peak host memory, beside the other library.

    python benchmarks/loading.py [--gigabytes=1] [--rounds=3] [--cold] [--output=FILE.jsonl]

Needs the extra [bench] (torch, transformers). Each round is a fresh process; the two take turns, the file stays in the
page cache, and imports are not timed. Every parameter is read once after loading, since a loader may only map the file.
The first round fills the page cache, and our cache of a model's shapes. Memory is the peak resident set of the process
less what it was before, so mapped pages count in both; for saving, what is added to the loaded model.

Each process touches as much memory as it will need before it loads, and again before it saves, and frees it: on some
virtual machines memory costs seconds a gigabyte where it was never used or was free for seconds, which is the host's
time. With --cold it does not. Both read with numpy, and neither waits until the saved file is on the disk.
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
load = lambda: jaxformer.from_pretrained(DIRECTORY)
read = lambda model: [float(numpy.asarray(x).ravel().sum()) for x in jax.tree.leaves(model.params)]
"""
THEIRS = """
import numpy, torch, transformers
from transformers import LlamaForCausalLM
load = lambda: LlamaForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32)
read = lambda model: [float(x.detach().numpy().ravel().sum()) for x in model.parameters()]
"""
MEASURE = """
import json, os, time
def resident(what):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(what)) / 1024
def measure(work):
    if not COLD:
        touched = numpy.empty(os.path.getsize(DIRECTORY + "/model.safetensors") * 5 // 4, numpy.uint8)
        touched[::4096] = 1
        del touched
    open("/proc/self/clear_refs", "w").write("5")  # the peak so far is forgotten
    before, begun, cpu = resident("VmRSS"), time.perf_counter(), time.process_time()
    result = work()
    return result, {
        "seconds": time.perf_counter() - begun,
        "cpu_seconds": time.process_time() - cpu,
        "peak_mb": resident("VmHWM") - before,
    }
def load_and_read():
    model = load()
    read(model)
    return model
model, loading = measure(load_and_read)
_, saving = measure(lambda: model.save_pretrained(TARGET))
print(json.dumps({"loading": loading, "saving": saving}))
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


def measure(program: str, place: Path, cold: bool) -> dict[str, dict[str, float]]:
    """Seconds, processor seconds and peak memory of loading and of saving."""
    with tempfile.TemporaryDirectory() as folder:
        code = f"DIRECTORY, TARGET, COLD = {str(place)!r}, {folder + '/saved'!r}, {cold}\n{program}\n{MEASURE}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--output", default="")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "llama"
        checkpoint(place, arguments.gigabytes)
        size = (place / "model.safetensors").stat().st_size / 2**20
        found: dict[str, list[dict[str, dict[str, float]]]] = {"jaxformer": [], "transformers": []}
        for round_ in range(arguments.rounds + 1):
            for name, program in (("jaxformer", OURS), ("transformers", THEIRS))[:: 1 if round_ % 2 else -1]:
                row = measure(program, place, arguments.cold)
                if round_:  # the first fills the page cache
                    found[name].append(row)
    print(f"file {size:.0f} MB; medians of {arguments.rounds} rounds")
    summary: dict[str, dict[str, dict[str, float]]] = {}
    for part in ("loading", "saving"):
        medians = {
            name: {key: statistics.median(row[part][key] for row in rows) for key in rows[0][part]}
            for name, rows in found.items()
        }
        ratio = {key: medians["jaxformer"][key] / medians["transformers"][key] for key in medians["jaxformer"]}
        summary[part] = {**medians, "ratio": ratio}
        for name, row in summary[part].items():
            print(f"{part:<8}{name:<14}" + "".join(f"{key} {value:10.2f}   " for key, value in row.items()))
    if arguments.output:
        with Path(arguments.output).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"file_mb": size, "cold": arguments.cold, **summary}) + "\n")


if __name__ == "__main__":
    main()
