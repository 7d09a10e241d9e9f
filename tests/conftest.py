"""Eight simulated devices, no accelerator, and a cache of the tests' own: set before anything imports jax."""

import os
import tempfile
from importlib import metadata

import shapes

os.environ["JAX_PLATFORMS"] = "cpu"
flags = ["--xla_force_host_platform_device_count=8"]
# Compiling is nearly all that small tests do: leave out the passes that only make large programs faster.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
if metadata.version("jaxlib").startswith("0.10."):
    # The older code generator compiles in half the time. Later versions no longer have it, and refuse unknown flags.
    flags.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join(flags)
os.environ.setdefault("JAXFORMER_CACHE", tempfile.mkdtemp(prefix="jaxformer-tests-"))
shapes.install()
