"""`python -m jaxformer` is `jaxformer`."""

from __future__ import annotations

from jaxformer.runtime import compilation, memory


def console() -> None:
    """The program. It restarts itself, if it does, before it imports all that the restarted process imports again."""
    compilation.enable_cache()
    memory.restart_with_tunables()
    memory.collect_garbage_rarely()
    from jaxformer import cli

    cli.console()


if __name__ == "__main__":
    console()
