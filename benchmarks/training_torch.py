"""The peer of `training.py`: the same models, batches and optimizer in torch, eager or compiled.

Hugging Face's GPT-2 and BERT where transformers is there, with torch's fused attention and GELU; the translation models
are plain modules. bfloat16 is autocast over float32 parameters, which is what jaxformer's compute precision is.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
import training_shared as shared  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

Tensors = dict[str, torch.Tensor]


class Decoder(nn.Module):
    """GPT-2."""

    def __init__(self, shape: shared.Shape) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        drop = shape.dropout
        self.model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=shape.vocab, n_positions=shape.length, n_embd=shape.width, n_layer=shape.layers,
                n_head=shape.heads, activation_function="gelu_pytorch_tanh", resid_pdrop=drop, embd_pdrop=drop,
                attn_pdrop=drop, use_cache=False, bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip

    def forward(self, batch: Tensors) -> torch.Tensor:
        return self.model(batch["target"]).logits


class Encoder(nn.Module):
    """BERT, its masked language model head included."""

    def __init__(self, shape: shared.Shape) -> None:
        from transformers import BertConfig, BertForMaskedLM

        super().__init__()
        self.model = BertForMaskedLM(
            BertConfig(
                vocab_size=shape.vocab, hidden_size=shape.width, num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads, intermediate_size=shape.inner, max_position_embeddings=shape.length,
                hidden_dropout_prob=shape.dropout, attention_probs_dropout_prob=shape.dropout,
            )
        )  # fmt: skip

    def forward(self, batch: Tensors) -> torch.Tensor:
        return self.model(batch["source"], attention_mask=batch["source_real"].long()).logits


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.both = nn.Linear(width, 2 * width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        split = lambda y: y.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # noqa: E731
        k, v = self.both(memory).chunk(2, dim=-1)
        o = F.scaled_dot_product_attention(split(self.query(x)), split(k), split(v), mask, is_causal=mask is None)
        return self.out(o.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Pre-norm, with cross-attention if there is a memory."""

    def __init__(self, shape: shared.Shape, cross: bool) -> None:
        super().__init__()
        width = shape.width
        self.attention, self.norm = Attention(width, shape.heads), nn.LayerNorm(width)
        self.cross, self.cross_norm = (Attention(width, shape.heads), nn.LayerNorm(width)) if cross else (None, None)
        self.up, self.down, self.ffn_norm = (
            nn.Linear(width, shape.inner),
            nn.Linear(shape.inner, width),
            nn.LayerNorm(width),
        )
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x, mask, memory=None, memory_mask=None):
        y = self.norm(x)
        x = x + self.drop(self.attention(y, y, mask))
        if self.cross is not None:
            x = x + self.drop(self.cross(self.cross_norm(x), memory, memory_mask))
        return x + self.drop(self.down(F.relu(self.up(self.ffn_norm(x)))))


class Translation(nn.Module):
    """Vaswani et al. 2017 with pre-norm and one table for both sides and the output."""

    def __init__(self, shape: shared.Shape) -> None:
        super().__init__()
        self.width = shape.width
        self.table = nn.Embedding(shape.vocab, shape.width)
        nn.init.normal_(self.table.weight, std=shape.width**-0.5)
        self.encoder = nn.ModuleList(Layer(shape, False) for _ in range(shape.layers))
        self.decoder = nn.ModuleList(Layer(shape, True) for _ in range(shape.layers))
        self.norms = nn.ModuleList([nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)])
        self.drop = nn.Dropout(shape.dropout)
        angle = torch.arange(shape.length)[:, None] / 10000 ** (torch.arange(0, shape.width, 2) / shape.width)
        self.register_buffer("codes", torch.stack([angle.sin(), angle.cos()], -1).flatten(1), persistent=False)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.drop(self.table(tokens) * math.sqrt(self.width) + self.codes[: tokens.shape[1]])

    def forward(self, batch: Tensors) -> torch.Tensor:
        mask = batch["source_real"][:, None, None]  # padded targets follow the real ones: causality hides them
        memory = self.embed(batch["source"])
        for layer in self.encoder:
            memory = layer(memory, mask)
        memory, x = self.norms[0](memory), self.embed(batch["target"])
        for layer in self.decoder:
            x = layer(x, None, memory, mask)
        return F.linear(self.norms[1](x), self.table.weight)


class Recurrent(nn.Module):
    """Bahdanau et al. 2015 with LSTMs: what was read before enters the next step beside the token."""

    def __init__(self, shape: shared.Shape) -> None:
        super().__init__()
        width = shape.width
        self.table = nn.Embedding(shape.vocab, width)
        nn.init.normal_(self.table.weight, std=width**-0.5)
        self.encoder = nn.LSTM(width, width // 2, bidirectional=True, batch_first=True)
        self.inputs, self.recurrent = nn.Linear(width, 4 * width), nn.Linear(2 * width, 4 * width, bias=False)
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.vector, self.bridge = nn.Linear(width, 1, bias=False), nn.Linear(width, 2 * width)
        self.output = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, batch: Tensors) -> torch.Tensor:
        real = batch["source_real"]
        packed = nn.utils.rnn.pack_padded_sequence(
            self.drop(self.table(batch["source"])), real.sum(1).cpu(), batch_first=True, enforce_sorted=False
        )
        memory, (last, _) = self.encoder(packed)
        memory = self.drop(nn.utils.rnn.pad_packed_sequence(memory, batch_first=True, total_length=real.shape[1])[0])
        keys = self.key(memory)
        h, c = torch.tanh(self.bridge(last.transpose(0, 1).flatten(1))).chunk(2, dim=-1)
        found = []
        for inputs in self.inputs(self.drop(self.table(batch["target"]))).unbind(1):
            scores = self.vector(torch.tanh(keys + self.query(h)[:, None]))[..., 0]
            probs = scores.float().masked_fill(~real, -1e30).softmax(-1).to(memory.dtype)
            context = torch.bmm(probs[:, None], memory)[:, 0]
            i, f, g, o = (inputs + self.recurrent(torch.cat([h.to(context.dtype), context], -1))).chunk(4, dim=-1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            found.append(torch.cat([h, context], -1))
        return F.linear(self.drop(torch.tanh(self.output(torch.stack(found, 1)))), self.table.weight)


FAMILIES = {"decoder": Decoder, "encoder": Encoder, "seq2seq": Translation, "rnn": Recurrent}


def bare(shape: shared.Shape, dtype: str) -> Callable[[], float]:
    """The products of all dense layers, forward and backward, and nothing else."""
    low = getattr(torch, dtype)
    operands = {
        (n, m, k): (torch.randn(n, m), torch.randn(m, k), torch.randn(n, k)) for n, m, k in shared.products(shape)
    }
    operands = {size: [x.to(low) for x in each] for size, each in operands.items()}

    def step() -> float:
        for size in shared.products(shape):
            x, kernel, dy = operands[size]
            _ = x @ kernel, dy @ kernel.T, x.T @ dy
        return 0.0

    return step


def main() -> None:
    task = shared.task()
    shape = task["shape"]
    about = {"versions": {"torch": torch.__version__}}
    if task["products"]:
        shared.serve(bare(shape, task["dtype"]), about)
        return
    torch.manual_seed(0)
    model = FAMILIES[shape.family](shape).train()
    decayed = [x for x in model.parameters() if x.dim() > 1]
    others = [x for x in model.parameters() if x.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.999), fused=True)
    low = task["dtype"] == "bfloat16"

    def loss_of(batch: Tensors) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            logits = model(batch)
        losses = F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten(), reduction="none")
        weights = batch["weights"].flatten()
        return (losses * weights).sum() / weights.sum()

    call = torch.compile(loss_of) if task["compile"] else loss_of
    numbers = (shared.batch(shape, seed) for seed in range(shared.BATCHES))
    as_tensor = lambda x: torch.from_numpy(x.astype("int64") if x.dtype == "int32" else x)  # noqa: E731
    turn = itertools.cycle([{name: as_tensor(x) for name, x in each.items()} for each in numbers])

    def step() -> float:
        loss = call(next(turn))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    count = sum(x.numel() for x in model.parameters())
    shared.serve(step, about | {"parameters": count})


if __name__ == "__main__":
    main()
