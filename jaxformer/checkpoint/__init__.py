"""Checkpoints: a training state, where its data stood, and what it measured. The only room that knows Orbax.

    workdir/checkpoints/last/<step>/    the newest `keep_last`, to resume from
    workdir/checkpoints/best/<step>/    the best `keep_best` by `metric`
    workdir/checkpoints/damaged/        what was not what had been written, set aside
    workdir/checkpoints/saving/         what is being written, replaced or deleted; left over after a kill, and then
                                        removed, or put back where it was the only one of its step

Each `<step>` is whole by itself: `state/` (arrays: step, params, opt_state, key, variables), `data/` (JSON: the state
of every process's batches), `about/` (JSON: format, step, values, progress, key implementation, resolved config) and
`manifest.json` (checksums). A step becomes visible by a rename, when all of it is on disk, so a killed process leaves
the earlier ones as they were. Arrays and JSON only: reading a checkpoint runs no code of whoever wrote it.

Format 1, of versions before there were manifests, is still read; its damage is noticed only where it is unreadable.
"""

from jaxformer.checkpoint.manifest import Damaged
from jaxformer.checkpoint.reading import (
    Used,
    Weights,
    about,
    arrays,
    directories,
    load,
    locate,
    mean,
    quality,
    ranked,
    read_data,
    read_state,
    read_weights,
    steps,
    verify,
)
from jaxformer.checkpoint.saving import Checkpoints, Saved
from jaxformer.checkpoint.trees import every_process, plain

__all__ = [
    "Checkpoints", "Damaged", "Saved", "Used", "Weights", "about", "arrays", "directories", "every_process", "load",
    "locate", "mean", "plain", "quality", "ranked", "read_data", "read_state", "read_weights", "steps", "verify",
]  # fmt: skip
