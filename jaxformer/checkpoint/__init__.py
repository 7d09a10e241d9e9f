"""Checkpoints: a training state, the state of its data, and its measures. The only room that uses Orbax.

    workdir/checkpoints/last/<step>/    the newest `keep_last`, to resume from
    workdir/checkpoints/best/<step>/    the best `keep_best` by `metric`
    workdir/checkpoints/damaged/        checkpoints that differ from what was written, moved out of the way
    workdir/checkpoints/saving/         checkpoints being written, replaced or deleted. After a kill, leftovers are
                                        removed, or moved back if they are the only checkpoint of their step

Each `<step>` is complete by itself: `state/` (arrays: step, params, opt_state, key, variables), `data/` (JSON: the
state of every process's batches), `about/` (JSON: format, step, values, progress, key implementation, resolved config)
and `manifest.json` (checksums). A step appears by a rename once all of it is on disk, so a killed process leaves the
earlier ones intact. There are only arrays and JSON: reading a checkpoint runs no code from it.

Format 1 has no manifest. It can be read, but its damage is noticed only if it is unreadable.
"""

from jaxformer.checkpoint.directories import (
    find_run,
    list_checkpoints,
    list_ranked,
    list_steps,
    ranking_score,
    read_about,
)
from jaxformer.checkpoint.manifest import Damaged
from jaxformer.checkpoint.reading import Weights, array_metadata, read_data, read_state, read_weights, verify
from jaxformer.checkpoint.saving import Checkpoints, RestoredCheckpoint
from jaxformer.checkpoint.trees import allgather_text, to_nested_dict
from jaxformer.checkpoint.weights import (
    LoadedRun,
    WeightsInfo,
    average_weights,
    checkpoints_of,
    load_run,
    param_shapes,
)

__all__ = [
    "Checkpoints", "Damaged", "LoadedRun", "RestoredCheckpoint", "Weights", "WeightsInfo", "allgather_text",
    "array_metadata", "average_weights", "checkpoints_of", "find_run", "list_checkpoints", "list_ranked", "list_steps",
    "load_run", "param_shapes", "ranking_score", "read_about", "read_data", "read_state", "read_weights",
    "to_nested_dict", "verify",
]  # fmt: skip
