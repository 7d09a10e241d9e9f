"""The tests' process, before anything imports jax: see environment.py and shapes.py."""

import gc

import environment
import shapes

environment.prepare()
# Tracing makes millions of objects that live on: looking through them for garbage is a tenth of the time.
gc.set_threshold(100_000, 50, 100)
shapes.install()
