"""Folders that belong to nobody's run, and whether what lies in them can be trusted."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from pathlib import Path

from jaxformer.config import ConfigError

VARIABLE = "JAXFORMER_CACHE"

logger = logging.getLogger("jaxformer")


def cache() -> Path:
    """Where things are kept that can be made again: $JAXFORMER_CACHE, or ~/.cache/jaxformer.

    Without a home that can be written it is a private folder among the temporary files. That is said once: the variable
    then names it, for this process and those that it starts.

    Raises:
      ConfigError: the variable names the home of a user who has none.
    """
    if os.environ.get(VARIABLE):
        return expanded(os.environ[VARIABLE], f"${VARIABLE}")
    try:
        folder = Path("~/.cache/jaxformer").expanduser().absolute()
        problem = "" if can_be_written(folder) else f"{folder} cannot be written"
    except RuntimeError:  # HOME is unset, and the user id has no name
        problem = "no home is known"
    if not problem:
        return folder
    folder = temporary()
    os.environ[VARIABLE] = str(folder)
    logger.warning("cache: %s, so %s is used; set %s to keep things elsewhere", problem, folder, VARIABLE)
    return folder


def expanded(path: str, what: str) -> Path:
    """An absolute path, with "~" as the user's home.

    Raises:
      ConfigError: nobody knows that home.
    """
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError:
        raise ConfigError(f"{what}: got {path!a}, whose home is not known, expected a whole path; set HOME") from None


def can_be_written(folder: Path) -> bool:
    """True if files can be written to `folder`, or it can be made."""
    for each in (folder, *folder.parents):
        try:
            each.stat()
        except FileNotFoundError:
            continue
        except OSError:
            return False
        return each.is_dir() and os.access(each, os.W_OK | os.X_OK)
    return False


def temporary() -> Path:
    """A folder of this user's among the temporary files, closed to others; a new one if somebody took its name."""
    folder = Path(tempfile.gettempdir()) / f"jaxformer-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
        if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077:
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="jaxformer-"))


def distrust(folder: Path) -> str:
    """Why somebody else may have put files into `folder`; empty if only its user and root can.

    The rule is that of ssh: it and every folder above belong to the user or to root and are writable by nobody else. A
    group of which the user is the only member does not count; above, a sticky folder such as /tmp is allowed.
    """
    own = os.geteuid()
    whole = folder.resolve()
    for each in (whole, *whole.parents):
        try:
            about = each.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{each} cannot be looked at ({error.strerror})"
        if about.st_uid not in (0, own):
            return f"{each} belongs to user {about.st_uid}"
        sticky = each != whole and about.st_mode & stat.S_ISVTX
        if not sticky and (about.st_mode & 0o002 or (about.st_mode & 0o020 and not _is_private(about.st_gid))):
            return f"{each} can be written by others (mode {stat.S_IMODE(about.st_mode):o})"
    if whole.is_dir():
        for entry in whole.iterdir():
            about = entry.lstat()
            if about.st_uid not in (0, own):
                return f"{entry} belongs to user {about.st_uid}"
    return ""


def _is_private(group: int) -> bool:
    """True if `group` is the user's own, named as the user and without other members."""
    import grp
    import pwd

    try:
        user, members = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and members.gr_name == user.pw_name and set(members.gr_mem) <= {user.pw_name}
