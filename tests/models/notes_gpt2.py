"""The study notes' GPT-2 in PyTorch, as they describe it, with the weights of a tree of ours copied over.

python tests/models/notes_gpt2.py      writes tests/models/notes_gpt2.npz (needs torch, not jax)
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

VOCAB, NARROW, WIDTH, HEADS, LAYERS, HIDDEN = 512, 128, 144, 6, 12, 2048
LOGITS = Path(__file__).with_suffix(".npz")

SHAPES = {
    "target_embed/table": (VOCAB, NARROW),
    "target_embed/up": (NARROW, WIDTH),
    "target_embed/up_bias": (WIDTH,),
    **{f"decoder/blocks/attention/{part}/kernel": (LAYERS, WIDTH, HEADS, 24) for part in ("query", "key", "value")},
    **{f"decoder/blocks/attention/{part}/bias": (LAYERS, HEADS, 24) for part in ("query", "key", "value")},
    "decoder/blocks/attention/out/kernel": (LAYERS, HEADS, 24, WIDTH),
    "decoder/blocks/attention/out/bias": (LAYERS, WIDTH),
    "decoder/blocks/attention_norm/scale": (LAYERS, WIDTH),
    "decoder/blocks/attention_norm/bias": (LAYERS, WIDTH),
    "decoder/blocks/ffn/in/kernel": (LAYERS, WIDTH, HIDDEN),
    "decoder/blocks/ffn/in/bias": (LAYERS, HIDDEN),
    "decoder/blocks/ffn/out/kernel": (LAYERS, HIDDEN, WIDTH),
    "decoder/blocks/ffn/out/bias": (LAYERS, WIDTH),
    "decoder/blocks/ffn_norm/scale": (LAYERS, WIDTH),
    "decoder/blocks/ffn_norm/bias": (LAYERS, WIDTH),
    "head/kernel": (WIDTH, VOCAB),
    "head/bias": (VOCAB,),
}


def weights() -> dict[str, np.ndarray]:
    """Random float32 weights by path; every bias and scale is away from its usual start, and row 0 is zero."""
    rng = np.random.default_rng(144)
    arrays = {path: 0.08 * rng.standard_normal(shape).astype(np.float32) for path, shape in SHAPES.items()}
    arrays["target_embed/table"][0] = 0.0
    return {path: array + 1.0 if path.endswith("scale") else array for path, array in arrays.items()}


def tokens() -> np.ndarray:
    """int64 `[2, 40]`; one is padding, which the notes' model sees like any other token."""
    ids = np.random.default_rng(6).integers(1, VOCAB, (2, 40))
    ids[1, 7] = 0
    return ids


def torch_logits() -> np.ndarray:
    """float32 `[2, 40, V]` of the notes' model with `weights`."""
    import torch
    from torch import nn

    class Notes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCAB, NARROW, padding_idx=0)
            self.projection = nn.Linear(NARROW, WIDTH)
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
            self.output = nn.Linear(WIDTH, VOCAB)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            length = ids.shape[1]
            angle = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
            position = torch.stack([angle.sin(), angle.cos()], dim=-1).reshape(length, WIDTH)
            mask = nn.Transformer.generate_square_subsequent_mask(length)
            return self.output(self.layers(self.projection(self.embedding(ids)) + position, mask=mask, is_causal=True))

    model, held = Notes().eval(), {path: torch.tensor(array) for path, array in weights().items()}
    assert sum(p.numel() for p in model.parameters()) == 8_271_696
    with torch.no_grad():
        model.embedding.weight.copy_(held["target_embed/table"])
        model.projection.weight.copy_(held["target_embed/up"].T)
        model.projection.bias.copy_(held["target_embed/up_bias"])
        model.output.weight.copy_(held["head/kernel"].T)
        model.output.bias.copy_(held["head/bias"])
        for i, layer in enumerate(model.layers.layers):
            block = {path.removeprefix("decoder/blocks/"): array[i] for path, array in held.items() if "blocks" in path}
            attention = layer.self_attn
            parts = ("query", "key", "value")
            kernels = [block[f"attention/{part}/kernel"].reshape(WIDTH, WIDTH).T for part in parts]
            attention.in_proj_weight.copy_(torch.cat(kernels))
            attention.in_proj_bias.copy_(torch.cat([block[f"attention/{part}/bias"].reshape(-1) for part in parts]))
            attention.out_proj.weight.copy_(block["attention/out/kernel"].reshape(WIDTH, WIDTH).T)
            attention.out_proj.bias.copy_(block["attention/out/bias"])
            for norm, name in ((layer.norm1, "attention_norm"), (layer.norm2, "ffn_norm")):
                norm.weight.copy_(block[f"{name}/scale"])
                norm.bias.copy_(block[f"{name}/bias"])
            for linear, name in ((layer.linear1, "ffn/in"), (layer.linear2, "ffn/out")):
                linear.weight.copy_(block[f"{name}/kernel"].T)
                linear.bias.copy_(block[f"{name}/bias"])
        return model(torch.tensor(tokens())).numpy()


if __name__ == "__main__":
    np.savez_compressed(LOGITS, logits=torch_logits()[:, ::3, ::16])
