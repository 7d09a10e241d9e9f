"""Directories outside of workdirs: the cache, its fallback, and a check of who can write to a directory."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from pathlib import Path

from jaxformer.errors import ConfigError

CACHE_VARIABLE = "JAXFORMER_CACHE"

logger = logging.getLogger("jaxformer")


def cache() -> Path:
    """Directory of files that can be recomputed: $JAXFORMER_CACHE, or ~/.cache/jaxformer.

    Without a writable home it is a private temporary directory. A warning says so once: the variable is then set, for
    this process and its children.

    Raises:
      ConfigError: the variable names the home of an unknown user.
    """
    if os.environ.get(CACHE_VARIABLE):
        return expand_user(os.environ[CACHE_VARIABLE], f"${CACHE_VARIABLE}")
    try:
        directory = Path("~/.cache/jaxformer").expanduser().absolute()
        problem = "" if is_writable(directory) else f"{directory} cannot be written"
    except RuntimeError:  # HOME is unset, and the user id has no name
        problem = "the home directory is not known"
    else:
        if not problem:
            return directory
    directory = private_temporary()
    os.environ[CACHE_VARIABLE] = str(directory)
    logger.warning("cache: %s, so %s is used; set %s to use another directory", problem, directory, CACHE_VARIABLE)
    return directory


def expand_user(path: str, what: str) -> Path:
    """Absolute path, with "~" replaced by the user's home.

    Args:
      what: the flag, field or variable that holds `path`, for the error.

    Raises:
      ConfigError: that home is not known, or `path` is an address.
    """
    if "://" in path:
        raise ConfigError(f"{what}: got {path!a}, expected a folder: this cannot lie in a bucket")
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:
        raise ConfigError(
            f"{what}: got {path!a}, whose home is not known, expected an absolute path; set HOME"
        ) from None


def is_writable(directory: Path) -> bool:
    """True if files can be written to `directory`, or it can be created."""
    for existing in (directory, *directory.parents):
        try:
            existing.stat()
        except FileNotFoundError:
            continue
        except OSError:
            return False
        return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return False


def private_temporary() -> Path:
    """Temporary directory of this user, closed to others; a new one if another user owns the usual name."""
    directory = Path(tempfile.gettempdir()) / f"jaxformer-{os.getuid()}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
            return directory
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="jaxformer-"))


def untrusted_reason(directory: Path) -> str:
    """Reason why another user may have written files to `directory`; empty if only this user and root can.

    The rule is the one of ssh: the directory and all of its parents belong to this user or to root, and nobody else can
    write to them. A group whose only member is this user is allowed, and so are sticky parents such as /tmp.
    """
    user = os.geteuid()
    resolved = directory.resolve()
    for path in (resolved, *resolved.parents):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{path} cannot be looked at ({error.strerror})"
        if status.st_uid not in (0, user):
            return f"{path} belongs to user {status.st_uid}"
        is_sticky = path != resolved and status.st_mode & stat.S_ISVTX
        by_others = status.st_mode & 0o002 or (status.st_mode & 0o020 and not _is_private(status.st_gid))
        if by_others and not is_sticky:
            return f"{path} can be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    if resolved.is_dir():
        for entry in resolved.iterdir():
            owner = entry.lstat().st_uid
            if owner not in (0, user):
                return f"{entry} belongs to user {owner}"
    return ""


def _is_private(group: int) -> bool:
    """True if `group` has the name of this user and no other members."""
    import grp
    import pwd

    try:
        user, members = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and members.gr_name == user.pw_name and set(members.gr_mem) <= {user.pw_name}
