"""Fine-tunes a Flax classifier on a task of the GLUE kind: sentences, or pairs of them, with a label.

The training loop is that of transformers' Flax examples (pmap, TrainState, optax); the model comes from
`jaxformer.hf.flax`. Data are JSON lines {"sentence1": ..., "sentence2": ..., "label": ...}.

    python examples/flax/run_flax_glue.py --model_name_or_path=DIR --train_file=train.json --validation_file=dev.json \
        --output_dir=out
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct, traverse_util
from flax.training import train_state
from flax.training.common_utils import onehot, shard
from tokenizers import Tokenizer

from jaxformer.hf.flax import AutoConfig, FlaxAutoModelForSequenceClassification


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description="Finetune a Flax classifier on a task of the GLUE kind")
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--train_file", required=True)
    parser.add_argument("--validation_file", required=True)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--max_seq_length", type=int, default=128)
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=8)
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--weight_decay", type=float, default=0.0)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--warmup_steps", type=int, default=0)
    parser.add_argument("--is_regression", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def load_split(path, tokenizer, args, label_to_id):
    examples = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line]
    tokenizer.enable_truncation(args.max_seq_length)
    tokenizer.enable_padding(length=args.max_seq_length)
    texts = [(e["sentence1"], e["sentence2"]) if "sentence2" in e else e["sentence1"] for e in examples]
    encodings = tokenizer.encode_batch(texts)
    labels = [float(e["label"]) if args.is_regression else label_to_id[e["label"]] for e in examples]
    return {
        "input_ids": np.array([e.ids for e in encodings], np.int32),
        "attention_mask": np.array([e.attention_mask for e in encodings], np.int32),
        "token_type_ids": np.array([e.type_ids for e in encodings], np.int32),
        "labels": np.array(labels),
    }


def create_train_state(model, learning_rate_fn, is_regression, num_labels, weight_decay):
    """Creates the initial training state: the model's parameters, AdamW, and the loss of the task."""

    class TrainState(train_state.TrainState):
        logits_fn: Callable = struct.field(pytree_node=False)
        loss_fn: Callable = struct.field(pytree_node=False)

    def decay_mask_fn(params):
        flat_params = traverse_util.flatten_dict(params)
        flat_mask = {path: path[-1] != "bias" and path[-2:] != ("LayerNorm", "scale") for path in flat_params}
        return traverse_util.unflatten_dict(flat_mask)

    tx = optax.adamw(learning_rate=learning_rate_fn, weight_decay=weight_decay, mask=decay_mask_fn)

    def mse_loss(logits, labels):
        return jnp.mean((logits[..., 0] - labels) ** 2)

    def cross_entropy_loss(logits, labels):
        return jnp.mean(optax.softmax_cross_entropy(logits, onehot(labels, num_classes=num_labels)))

    return TrainState.create(
        apply_fn=model.__call__,
        params=model.params,
        tx=tx,
        logits_fn=(lambda logits: logits[..., 0]) if is_regression else (lambda logits: logits.argmax(-1)),
        loss_fn=mse_loss if is_regression else cross_entropy_loss,
    )


def data_collator(rng, dataset, batch_size):
    steps_per_epoch = len(dataset["labels"]) // batch_size
    perms = np.asarray(jax.random.permutation(rng, len(dataset["labels"])))
    perms = perms[: steps_per_epoch * batch_size].reshape((steps_per_epoch, batch_size))
    for perm in perms:
        yield shard({k: v[perm] for k, v in dataset.items()})


def replicate(tree):
    """A copy of the tree for each device."""
    count = jax.local_device_count()
    return jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * count), tree)


def unreplicate(tree):
    return jax.tree.map(lambda x: x[0], tree)


def main(argv=None):
    args = parse_args(argv)
    train_labels = [json.loads(line)["label"] for line in Path(args.train_file).read_text().splitlines() if line]
    label_list = sorted(set(train_labels))
    num_labels = 1 if args.is_regression else len(label_list)
    label_to_id = {label: i for i, label in enumerate(label_list)}

    config = AutoConfig.from_pretrained(args.model_name_or_path, num_labels=num_labels)
    tokenizer = Tokenizer.from_file(os.path.join(args.model_name_or_path, "tokenizer.json"))
    model = FlaxAutoModelForSequenceClassification.from_pretrained(args.model_name_or_path, config=config)

    train_dataset = load_split(args.train_file, tokenizer, args, label_to_id)
    eval_dataset = load_split(args.validation_file, tokenizer, args, label_to_id)

    train_batch_size = args.per_device_train_batch_size * jax.local_device_count()
    eval_batch_size = args.per_device_eval_batch_size * jax.local_device_count()
    steps = len(train_dataset["labels"]) // train_batch_size * args.num_train_epochs
    learning_rate_fn = optax.join_schedules(
        [
            optax.linear_schedule(0.0, args.learning_rate, args.warmup_steps),
            optax.linear_schedule(args.learning_rate, 0.0, max(steps - args.warmup_steps, 1)),
        ],
        [args.warmup_steps],
    )

    rng = jax.random.PRNGKey(args.seed)
    dropout_rngs = jax.random.split(rng, jax.local_device_count())
    state = create_train_state(model, learning_rate_fn, args.is_regression, num_labels, args.weight_decay)

    def train_step(state, batch, dropout_rng):
        """Trains model with an optimizer (both in `state`) on `batch`, returning a pair `(new_state, loss)`."""
        dropout_rng, new_dropout_rng = jax.random.split(dropout_rng)
        targets = batch.pop("labels")

        def loss_fn(params):
            logits = state.apply_fn(**batch, params=params, dropout_rng=dropout_rng, train=True)[0]
            return state.loss_fn(logits, targets)

        loss, grad = jax.value_and_grad(loss_fn)(state.params)
        grad = jax.lax.pmean(grad, "batch")
        new_state = state.apply_gradients(grads=grad)
        metrics = jax.lax.pmean({"loss": loss, "learning_rate": learning_rate_fn(state.step)}, axis_name="batch")
        return new_state, metrics, new_dropout_rng

    def eval_step(state, batch):
        logits = state.apply_fn(**batch, params=state.params, train=False)[0]
        return state.logits_fn(logits)

    p_train_step = jax.pmap(train_step, axis_name="batch", donate_argnums=(0,))
    p_eval_step = jax.pmap(eval_step, axis_name="batch")

    state, losses, train_time = replicate(state), [], time.time()
    for _epoch in range(args.num_train_epochs):
        rng, input_rng = jax.random.split(rng)
        for batch in data_collator(input_rng, train_dataset, train_batch_size):
            state, metrics, dropout_rngs = p_train_step(state, batch, dropout_rngs)
            losses.append(float(unreplicate(metrics)["loss"]))

    labels, predictions = eval_dataset.pop("labels"), []
    for start in range(0, len(labels), eval_batch_size):
        rows = np.arange(start, start + eval_batch_size) % len(labels)  # the last batch is filled up
        batch = shard({k: v[rows] for k, v in eval_dataset.items()})
        predictions.extend(np.asarray(p_eval_step(state, batch)).reshape(-1))
    predictions = np.array(predictions[: len(labels)])
    score = np.mean((predictions - labels) ** 2) if args.is_regression else np.mean(predictions == labels)
    result = {"mse" if args.is_regression else "accuracy": float(score), "losses": losses}
    print(f"{time.time() - train_time:.1f} s, {result}")

    model.save_pretrained(args.output_dir, params=jax.device_get(unreplicate(state.params)))
    return result


if __name__ == "__main__":
    main()
