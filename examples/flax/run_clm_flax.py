"""Trains or fine-tunes a Flax causal language model on a text file, and measures perplexity.

The training loop is that of transformers' Flax examples (pmap, TrainState, optax); the model comes from
`jaxformer.hf.flax`, with weights (`--model_name_or_path`) or from a config alone (`--config_name`).

    python examples/flax/run_clm_flax.py --model_name_or_path=DIR --train_file=train.txt --validation_file=dev.txt \
        --output_dir=out
"""

import argparse
import math
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

from jaxformer.hf.flax import AutoConfig, FlaxAutoModelForCausalLM


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description="Train a Flax causal language model")
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--config_name")
    parser.add_argument("--tokenizer_name")
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--validation_file", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--block_size", type=int, default=128)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


class TrainState(train_state.TrainState):
    dropout_rng: jnp.ndarray

    def replicate(self):
        count = jax.local_device_count()
        state = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * count), self)
        return state.replace(dropout_rng=shard_prng_key(self.dropout_rng))


def group_texts(path, tokenizer, block_size):
    """All tokens of the file, in blocks of the same length."""
    ids = tokenizer.encode(Path(path).read_text(encoding="utf-8")).ids
    blocks = np.array(ids[: len(ids) // block_size * block_size], np.int32).reshape(-1, block_size)
    return {"input_ids": blocks, "attention_mask": np.ones_like(blocks), "labels": blocks.copy()}


def data_loader(rng, dataset, batch_size, shuffle=False):
    count = len(dataset["labels"])
    indices = np.asarray(jax.random.permutation(rng, count)) if shuffle else np.arange(count)
    for i in range(count // batch_size):
        yield shard({k: v[indices[i * batch_size : (i + 1) * batch_size]] for k, v in dataset.items()})


def loss_fn(logits, labels):
    shift_logits, shift_labels = logits[..., :-1, :], labels[..., 1:]
    return optax.softmax_cross_entropy(shift_logits, onehot(shift_labels, shift_logits.shape[-1])).mean()


def main(argv=None):
    args = parse_args(argv)
    dtype = getattr(jnp, args.dtype)
    if args.model_name_or_path:
        model = FlaxAutoModelForCausalLM.from_pretrained(args.model_name_or_path, seed=args.seed, dtype=dtype)
    else:
        config = AutoConfig.from_pretrained(args.config_name)
        model = FlaxAutoModelForCausalLM.from_config(config, seed=args.seed, dtype=dtype)
    source = args.tokenizer_name or args.model_name_or_path or args.config_name
    tokenizer = Tokenizer.from_file(os.path.join(source, "tokenizer.json"))

    train_dataset = group_texts(args.train_file, tokenizer, args.block_size)
    eval_dataset = group_texts(args.validation_file, tokenizer, args.block_size)

    rng, dropout_rng = jax.random.split(jax.random.PRNGKey(args.seed))
    batch_size = args.per_device_train_batch_size * jax.local_device_count()
    steps = len(train_dataset["labels"]) // batch_size * args.num_train_epochs
    linear_decay_lr_schedule_fn = optax.linear_schedule(args.learning_rate, 0.0, max(steps, 1))

    def decay_mask_fn(params):
        flat_params = traverse_util.flatten_dict(params)
        return traverse_util.unflatten_dict({path: path[-1] not in ("bias", "scale") for path in flat_params})

    optimizer = optax.adamw(learning_rate=linear_decay_lr_schedule_fn, weight_decay=0.01, mask=decay_mask_fn)
    state = TrainState.create(apply_fn=model.__call__, params=model.params, tx=optimizer, dropout_rng=dropout_rng)

    def train_step(state, batch):
        dropout_rng, new_dropout_rng = jax.random.split(state.dropout_rng)

        def compute_loss(params):
            labels = batch.pop("labels")
            logits = state.apply_fn(**batch, params=params, dropout_rng=dropout_rng, train=True)[0]
            return loss_fn(logits, labels)

        loss, grad = jax.value_and_grad(compute_loss)(state.params)
        grad = jax.lax.pmean(grad, "batch")
        new_state = state.apply_gradients(grads=grad, dropout_rng=new_dropout_rng)
        return new_state, jax.lax.pmean({"loss": loss}, axis_name="batch")

    def eval_step(params, batch):
        labels = batch.pop("labels")
        logits = model(**batch, params=params, train=False)[0]
        return jax.lax.pmean({"loss": loss_fn(logits, labels)}, axis_name="batch")

    p_train_step = jax.pmap(train_step, "batch", donate_argnums=(0,))
    p_eval_step = jax.pmap(eval_step, "batch")

    state, losses = state.replicate(), []
    for _epoch in range(args.num_train_epochs):
        rng, input_rng = jax.random.split(rng)
        for batch in data_loader(input_rng, train_dataset, batch_size, shuffle=True):
            state, metrics = p_train_step(state, batch)
            losses.append(float(metrics["loss"][0]))

    evaluated = [
        float(p_eval_step(state.params, batch)["loss"][0]) for batch in data_loader(rng, eval_dataset, batch_size)
    ]
    eval_loss = float(np.mean(evaluated))
    params = jax.device_get(jax.tree.map(lambda x: x[0], state.params))
    model.save_pretrained(args.output_dir, params=params)
    return {"losses": losses, "eval_loss": eval_loss, "perplexity": math.exp(eval_loss)}


if __name__ == "__main__":
    print(main())
