"""Fine-tunes a Flax encoder-decoder on summarisation, and writes summaries of the validation set.

The training loop is that of transformers' Flax examples (pmap, TrainState, optax, label smoothing, beam search under
pmap); the model comes from `jaxformer.hf.flax`. Data are JSON lines {"text": ..., "summary": ...}.

    python examples/flax/run_summarization_flax.py --model_name_or_path=DIR --train_file=train.json \
        --validation_file=dev.json --output_dir=out
"""

import argparse
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from flax.training import train_state
from flax.training.common_utils import onehot, shard, shard_prng_key
from tokenizers import Tokenizer

from jaxformer.hf.flax import AutoConfig, FlaxAutoModelForSeq2SeqLM


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description="Finetune a Flax encoder-decoder on summarisation")
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--validation_file", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--max_source_length", type=int, default=1024)
    parser.add_argument("--max_target_length", type=int, default=128)
    parser.add_argument("--num_beams", type=int, default=4)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--label_smoothing_factor", type=float, default=0.0)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


class TrainState(train_state.TrainState):
    dropout_rng: jnp.ndarray

    def replicate(self):
        count = jax.local_device_count()
        state = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * count), self)
        return state.replace(dropout_rng=shard_prng_key(self.dropout_rng))


def shift_tokens_right(input_ids, pad_token_id, decoder_start_token_id):
    """Shifts input ids one token to the right."""
    shifted = np.zeros_like(input_ids)
    shifted[:, 1:] = input_ids[:, :-1]
    shifted[:, 0] = decoder_start_token_id
    return np.where(shifted == -100, pad_token_id, shifted)


def preprocess(path, tokenizer, config, args):
    examples = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line]

    def encode(texts, length):
        tokenizer.enable_truncation(length)
        tokenizer.enable_padding(length=length, pad_id=config.pad_token_id)
        encodings = tokenizer.encode_batch(texts)
        return [np.array([getattr(e, name) for e in encodings], np.int32) for name in ("ids", "attention_mask")]

    input_ids, attention_mask = encode([e["text"] for e in examples], args.max_source_length)
    labels, decoder_attention_mask = encode([e["summary"] for e in examples], args.max_target_length)
    decoder_input_ids = shift_tokens_right(labels, config.pad_token_id, config.decoder_start_token_id)
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "labels": labels,
        "decoder_input_ids": decoder_input_ids,
        "decoder_attention_mask": decoder_attention_mask,
    }


def data_loader(rng, dataset, batch_size):
    indices = np.asarray(jax.random.permutation(rng, len(dataset["labels"])))
    for i in range(len(indices) // batch_size):
        yield {k: v[indices[i * batch_size : (i + 1) * batch_size]] for k, v in dataset.items()}


def loss_fn(logits, labels, padding_mask, label_smoothing_factor=0.0):
    """Cross-entropy with smoothed labels, summed over real tokens, and their number."""
    vocab_size = logits.shape[-1]
    confidence = 1.0 - label_smoothing_factor
    low_confidence = (1.0 - confidence) / (vocab_size - 1)
    normalizing_constant = -(
        confidence * jnp.log(confidence) + (vocab_size - 1) * low_confidence * jnp.log(low_confidence + 1e-20)
    )
    soft_labels = onehot(labels, vocab_size, on_value=confidence, off_value=low_confidence)
    loss = optax.softmax_cross_entropy(logits, soft_labels) - normalizing_constant
    return (loss * padding_mask).sum(), padding_mask.sum()


def main(argv=None):
    args = parse_args(argv)
    config = AutoConfig.from_pretrained(args.model_name_or_path)
    tokenizer = Tokenizer.from_file(os.path.join(args.model_name_or_path, "tokenizer.json"))
    model = FlaxAutoModelForSeq2SeqLM.from_pretrained(args.model_name_or_path, config=config, seed=args.seed)
    if args.gradient_checkpointing:
        model.enable_gradient_checkpointing()

    train_dataset = preprocess(args.train_file, tokenizer, model.config, args)
    eval_dataset = preprocess(args.validation_file, tokenizer, model.config, args)

    rng, dropout_rng = jax.random.split(jax.random.PRNGKey(args.seed))
    batch_size = args.per_device_train_batch_size * jax.local_device_count()
    steps = len(train_dataset["labels"]) // batch_size * args.num_train_epochs
    linear_decay_lr_schedule_fn = optax.linear_schedule(args.learning_rate, 0.0, max(steps, 1))

    def decay_mask_fn(params):
        flat_params = traverse_util.flatten_dict(params)
        layer_norms = {path[-2:] for path in flat_params if "norm" in "".join(path).lower() and path[-1] == "scale"}
        flat_mask = {path: path[-1] != "bias" and path[-2:] not in layer_norms for path in flat_params}
        return traverse_util.unflatten_dict(flat_mask)

    adamw = optax.adamw(learning_rate=linear_decay_lr_schedule_fn, mask=decay_mask_fn)
    state = TrainState.create(apply_fn=model.__call__, params=model.params, tx=adamw, dropout_rng=dropout_rng)

    def train_step(state, batch):
        dropout_rng, new_dropout_rng = jax.random.split(state.dropout_rng)

        def compute_loss(params):
            labels = batch.pop("labels")
            logits = state.apply_fn(**batch, params=params, dropout_rng=dropout_rng, train=True)[0]
            return loss_fn(logits, labels, batch["decoder_attention_mask"], args.label_smoothing_factor)

        (loss, num_labels), grad = jax.value_and_grad(compute_loss, has_aux=True)(state.params)
        num_labels = jax.lax.psum(num_labels, "batch")
        loss = jax.lax.psum(loss, "batch") / num_labels
        grad = jax.tree.map(lambda x: x / num_labels, jax.lax.psum(grad, "batch"))
        return state.apply_gradients(grads=grad, dropout_rng=new_dropout_rng), {"loss": loss}

    gen_kwargs = {"max_length": args.max_target_length, "num_beams": args.num_beams}

    def generate_step(params, batch):
        model.params = params
        output_ids = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], **gen_kwargs)
        return output_ids.sequences

    p_train_step = jax.pmap(train_step, "batch", donate_argnums=(0,))
    p_generate_step = jax.pmap(generate_step, "batch")

    state, losses = state.replicate(), []
    for _epoch in range(args.num_train_epochs):
        rng, input_rng = jax.random.split(rng)
        for batch in data_loader(input_rng, train_dataset, batch_size):
            state, metrics = p_train_step(state, shard(batch))
            losses.append(float(metrics["loss"][0]))

    predictions = []
    for start in range(0, len(eval_dataset["labels"]), batch_size):
        rows = np.arange(start, start + batch_size) % len(eval_dataset["labels"])
        batch = shard({k: eval_dataset[k][rows] for k in ("input_ids", "attention_mask")})
        sequences = jax.device_get(p_generate_step(state.params, batch))
        predictions.extend(sequences.reshape(-1, args.max_target_length))
    summaries = tokenizer.decode_batch([list(map(int, row)) for row in predictions[: len(eval_dataset["labels"])]])

    params = jax.device_get(jax.tree.map(lambda x: x[0], state.params))
    model.save_pretrained(args.output_dir, params=params)
    Path(args.output_dir, "generated.txt").write_text("\n".join(summaries) + "\n", encoding="utf-8")
    return {"losses": losses, "summaries": summaries}


if __name__ == "__main__":
    print(main()["losses"][-1])
