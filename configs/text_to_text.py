"""Two tasks in one model, as text (T5, Raffel et al. 2020): sentiment (SST-2) and translation (Multi30k, to German).

`unseen_prompt` is never trained on: the sentences of SST-2's test split under a prompt of other words, judged by the
likelihood of the two answers (rank classification). `DIR` holds the folders sst2 and multi30k_en_de.

Command:  python -m jaxformer train --config=configs/text_to_text.py --workdir=runs/text_to_text --config.data.dir=DIR
          python -m jaxformer evaluate --workdir=runs/text_to_text --split=test
          echo "sst2 sentence: a fine film ." | python -m jaxformer decode --workdir=runs/text_to_text
Hardware: 2 CPU cores
Time:     5.1 minutes of processor time; 38 minutes beside six times as many processes as cores
Score:    test SST-2 75.1 % accuracy; test2016 7.5 BLEU cased 13a (greedy, 600 steps: 0.6 epochs of Multi30k, 0.4 of
          SST-2's phrases); unseen_prompt 69.5 % by rank; the more frequent class is 50.1 % of SST-2's test split
"""

from jaxformer.config import MixtureConfig, StackConfig
from jaxformer.config.overrides import defaults, section


def get_config():
    config = defaults()
    sentiment = dict(target="{label}", words={"0": "negative", "1": "positive"})
    sentences = dict(
        source="table",
        dir="sst2",
        splits={
            "train": ("glue.train.tsv.gz",),
            "validation": ("sentences.dev.tsv",),
            "test": ("sentences.test.tsv",),
        },
        columns={"text": "sentence", "label": "label"},
    )
    sst2 = sentences | dict(
        task=dict(name="text_to_text", template=dict(source="sst2 sentence: {text}", **sentiment)),
    )
    multi30k = dict(
        source="parallel",
        dir="multi30k_en_de",
        splits={
            "train": ("train.en.gz", "train.de.gz"),
            "validation": ("val.en", "val.de"),
            "test": ("test_2016_flickr.en", "test_2016_flickr.de"),
        },
        task=dict(
            name="text_to_text",
            template=dict(source="translate to german: {source}", scores=("bleu", "chrf")),
        ),
    )
    unseen_prompt = sentences | dict(
        weight=0.0,
        splits={"test": ("sentences.test.tsv",)},
        task=dict(
            name="text_to_text",
            template=dict(source="{text} - was this film liked?", predict="rank", **sentiment),
        ),
    )
    config.data.mixture = section(
        MixtureConfig,
        components=dict(sst2=sst2, multi30k=multi30k, unseen_prompt=unseen_prompt),
        temperature=2.0,
    )
    config.data.tokenizer.kind = "bpe"
    config.data.tokenizer.vocab = 6000
    config.data.tokens = 2048
    config.data.batch = 128
    config.data.length = 64
    config.data.buckets = (16, 32)
    config.task.name = "text_to_text"

    stack = dict(
        layers=2,
        width=128,
        dropout=0.1,
        embed=dict(scale=True, dropout=0.1),
        attention=dict(heads=4),
        ffn=dict(width=256, activation="relu"),
    )
    config.model.encoder = section(StackConfig, **stack)
    config.model.decoder = section(StackConfig, **stack)
    config.model.share_embeddings = True

    config.optimizer.beta2 = 0.98
    config.schedule.kind = "linear"
    config.schedule.peak = 4e-3
    config.schedule.warmup = 100
    config.schedule.floor = 0.02
    config.train.steps = 600
    config.train.evaluate_every = 300
    config.train.checkpoint_every = 50
    config.checkpoint.keep_last = 3
    config.checkpoint.average = 3
    config.evaluate.samples = 2
    config.decode.max_length = 64
    return config
