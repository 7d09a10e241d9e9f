"""A Hugging Face language model made to answer: replies of conversations (SFT), then preferences (DPO), with LoRA.

Command:  jaxformer train --config=configs/chat.py:sft --workdir=runs/sft \
              --config.init.directory=HF_DIR --config.data.dir=DIR
          jaxformer train --config=configs/chat.py:dpo --workdir=runs/dpo \
              --config.init.directory=runs/sft --config.data.dir=DIR
          jaxformer chat --workdir=runs/dpo
          jaxformer export --workdir=runs/dpo --target=out/chat
Files:    DIR/conversations.jsonl, DIR/preferences.jsonl (docs/post-training.md)
Variants: sft, dpo
Hardware: accelerators
Time:     not measured here
Score:    not measured here
"""

from jaxformer.config import AdapterConfig
from jaxformer.config.overrides import defaults, section

VARIANTS = ("sft", "dpo")


def get_config(variant="sft"):
    config = defaults()
    config.data.length = 1024
    config.data.batch = 16
    config.optimizer.weight_decay = 0.0
    config.schedule.kind = "linear"
    config.schedule.warmup = 20
    config.train.steps = 500
    config.train.evaluate_every = config.train.checkpoint_every = 100
    config.decode.max_length = 256
    if variant == "sft":
        file = "conversations.jsonl"
        config.init.directory = "HF_DIR"  # given on the command line: model, tokenizer and chat template
        config.task.name = "dialogue"
        config.data.source = "dialogues"
        config.data.packing = "first_fit"
        config.model.adapter = section(AdapterConfig, rank=16, alpha=32.0, targets=("attention", "ffn"))
        config.schedule.peak = 2e-4
    else:
        file = "preferences.jsonl"
        config.init.directory = "runs/sft"  # its adapters are trained on; with them it is the reference
        config.task.name = "preference"
        config.data.source = "preferences"
        config.schedule.peak = 2e-5
        config.checkpoint.metric = "accuracy"
        config.checkpoint.mode = "max"
    config.data.splits = {"train": (f"{file}[:95%]",), "validation": (f"{file}[95%:]",)}
    return config
