"""The peer of `gpu.py`: the same decoder trained by torch, with its own flash attention, compiler and fused AdamW.

    python benchmarks/gpu_torch.py '{"shape": {"layers": 12, ...}, "toy": false}'

Pre-norm blocks with biases, learned positions, tanh GELU, tied head; float32 parameters and bfloat16 by autocast.
Without torch, or without a GPU (unless it is a toy), the row says so.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import gpu_shared as shared  # noqa: E402

try:
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    shared.say({"skipped": "torch is not installed"})
    sys.exit(0)

Row = dict[str, Any]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, head_width: int, ffn_width: int) -> None:
        super().__init__()
        self.split = (3, heads, head_width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * heads * head_width)
        self.out = nn.Linear(heads * head_width, width)
        self.up, self.down = nn.Linear(width, ffn_width), nn.Linear(ffn_width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = self.project(self.before(x)).view(rows, length, *self.split).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).reshape(rows, length, -1))
        return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))


class Decoder(nn.Module):
    def __init__(self, shape: Row) -> None:
        super().__init__()
        width = shape["width"]
        self.table, self.positions = nn.Embedding(shape["vocab"], width), nn.Embedding(shape["length"], width)
        sizes = (width, shape["heads"], shape["head_width"], shape["ffn_width"])
        self.blocks = nn.ModuleList(Block(*sizes) for _ in range(shape["layers"]))
        self.norm = nn.LayerNorm(width)
        for part in self.parameters():
            if part.dim() > 1:
                nn.init.normal_(part, std=0.02)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.table(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.table.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Training:
    def __init__(self, shape: Row, batches: int, device: str) -> None:
        torch.manual_seed(0)
        self.shape, self.device, self.losses = shape, device, []
        with torch.device(device):
            self.model = Decoder(shape)
        whole = [x for name, x in self.model.named_parameters() if x.dim() > 1 and "blocks" in name]  # what decays
        rest = [x for name, x in self.model.named_parameters() if not (x.dim() > 1 and "blocks" in name)]
        groups = [{"params": whole, "weight_decay": shape["decay"]}, {"params": rest, "weight_decay": 0.0}]
        settings = {"lr": shape["rate"], "betas": tuple(shape["betas"]), "fused": device == "cuda"}
        self.optimizer = torch.optim.AdamW(groups, **settings)
        self.call = torch.compile(self.model) if device == "cuda" else self.model
        size = (shape["rows"], shape["length"] + 1, shape["real_vocab"])
        texts = [torch.from_numpy(shared.tokens(*size, seed).astype("int64")) for seed in range(batches)]
        self.turn = itertools.cycle([x.pin_memory() for x in texts] if device == "cuda" else texts)

    def step(self) -> None:
        text = next(self.turn).to(self.device, non_blocking=True)
        with torch.autocast(self.device, dtype=torch.bfloat16):
            loss = self.call(text[:, :-1], text[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.shape["clip"])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())

    def run(self, count: int) -> float:
        """Seconds of so many steps, begun and ended with an idle device."""
        self.wait()
        begun = time.perf_counter()
        for _ in range(count):
            self.step()
        self.wait()
        return time.perf_counter() - begun

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure(shape: Row, toy: bool) -> Row:
    about = {"versions": {"torch": torch.__version__, "cuda": torch.version.cuda}}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not toy:
        return about | {"skipped": "torch sees no GPU"}
    about["device"] = torch.cuda.get_device_name() if device == "cuda" else device
    torch.set_float32_matmul_precision("high")
    timing = shared.TOY if toy else shared.FULL
    training = Training(shape, timing.batches, device)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION if device == "cuda" else SDPBackend.MATH):
        first = training.run(1)  # compiles
        training.run(timing.batches - 1)
        seconds = [training.run(timing.steps) for _ in range(timing.windows)]
    losses = [float(x) for x in training.losses]
    row = about | {
        "parameters": sum(x.numel() for x in training.model.parameters()),
        "losses": losses,
        "memory_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }
    problem = shared.wrong(losses, timing.batches)
    if problem:
        return row | {"failed": problem}
    row |= shared.figures(seconds, timing.steps, shape["rows"] * shape["length"])
    return row | {"compile_seconds": first - row["step_ms"] / 1e3}


def main() -> None:
    task = json.loads(sys.argv[1])
    shared.say(shared.guarded(functools.partial(measure, task["shape"], task["toy"])))


if __name__ == "__main__":
    main()
