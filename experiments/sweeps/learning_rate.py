"""Which peak learning rate suits a recipe, and how much chance there is in the answer: 4 rates x 3 seeds.

jaxformer sweep --config=configs/quickstart.py --sweep=experiments/sweeps/learning_rate.py --workdir=runs/rates
"""

from jaxformer.sweep import cross, grid, seeds

SWEEP = cross(grid({"schedule.peak": [3e-4, 1e-3, 3e-3, 1e-2]}), seeds(3))
