"""The training step, evaluation, and the loop that ties them to data and checkpoints."""
