"""Distillation of a small language model of bytes: a teacher, a student that has it, and the same student without.

Command:  jaxformer train --config=configs/distil.py:teacher --workdir=runs/teacher
          jaxformer train --config=configs/distil.py:student --workdir=runs/student --seeds=3
          jaxformer train --config=configs/distil.py:alone --workdir=runs/alone --seeds=3
Variants: teacher  3 layers of width 128
          student  1 layer of width 48, which learns from the labels and from runs/teacher
          alone    the same from the labels
Hardware: 2 CPU cores, shared with other work
Time:     processor time: teacher 134 seconds, student 40 and alone 18 a seed
Score:    validation, nats a byte, mean of 3 seeds: student 2.092, alone 2.152; teacher 1.606. At the student's
          processor time alone is better: 1.955 with --config.train.steps=880, 30 seconds a seed
"""

from jaxformer.config import DistillationConfig, StackConfig
from jaxformer.config.overrides import defaults, section

VARIANTS = ("teacher", "student", "alone")


def get_config(variant: str = "teacher"):
    large = {"teacher": True, "student": False, "alone": False}[variant or "teacher"]
    config = defaults()
    config.data.source = "pylib"
    config.data.document = "file"
    config.data.tokenizer.kind = "byte"
    config.data.packing = "concat"
    config.data.length = 128
    config.data.batch = 16
    config.task.name = "language_modelling"
    config.model.decoder = section(
        StackConfig,
        layers=3 if large else 1,
        width=128 if large else 48,
        attention=dict(heads=4, bias=False),
        encoding=dict(kind="rope"),
        norm=dict(kind="rms"),
    )
    if variant == "student":
        config.distillation = section(DistillationConfig, directory="runs/teacher", weight=0.5, temperature=2.0)

    config.optimizer.beta2 = 0.98
    config.schedule.peak = 4e-3
    config.schedule.warmup = 50
    config.train.steps = 800 if large else 400
    config.train.evaluate_every = config.train.checkpoint_every = 400
    config.evaluate.examples = 8
    return config
