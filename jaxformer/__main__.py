"""`python -m jaxformer` is `jaxformer`."""

from jaxformer.cli import console

console()
