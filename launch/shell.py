"""Pieces of shell scripts that several engines share."""

from __future__ import annotations

WAIT = """\
signals=0
seen=-1
{why}trap 'signals=$((signals + 1)); kill -TERM "${variable}"' {signals}
# A signal interrupts wait, whose code is then the signal's. Only an uninterrupted wait returns the run's exit code.
while [ "$seen" -ne "$signals" ]; do
  seen=$signals
  code=0
  wait "${variable}" || code=$?
done
"""


def wait_for(variable: str, signals: str = "TERM", why: str = "") -> str:
    """Lines that wait for the process in `$variable`, pass signals on as SIGTERM, and put its exit code into `$code`.

    Args:
      variable: shell variable with the process.
      signals: names of the signals to pass on.
      why: a comment before the trap.
    """
    return WAIT.format(variable=variable, signals=signals, why=f"# {why}\n" if why else "")
