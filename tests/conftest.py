"""Eight simulated devices, no accelerator, and a cache of the tests' own: set before anything imports jax."""

import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
# Compiling is nearly all that small tests do: leave out the passes that only make large programs faster.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ.setdefault("JAXFORMER_CACHE", tempfile.mkdtemp(prefix="jaxformer-tests-"))
