"""The cache directory without a home, and which directories are trusted."""

import os
import stat
from pathlib import Path

import pytest

from jaxformer.config import ConfigError
from jaxformer.runtime import directories


@pytest.fixture
def homeless(monkeypatch, tmp_path):
    """No home that can be written; temporary files lie in `tmp_path`."""
    monkeypatch.delenv(directories.CACHE_VARIABLE, raising=False)
    monkeypatch.setattr(directories.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(directories.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def no_home(self):
    raise RuntimeError("Could not determine home directory.")


def test_without_a_home_the_cache_is_a_private_temporary_folder_which_is_said_once(homeless, monkeypatch, caplog):
    monkeypatch.setattr(Path, "expanduser", no_home)
    folder = directories.cache()
    assert folder == homeless / f"jaxformer-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert os.environ[directories.CACHE_VARIABLE] == str(folder), "for the processes that this one starts"
    monkeypatch.setattr(Path, "expanduser", lambda self: self)
    assert directories.cache() == folder
    assert caplog.text.count("the home directory is not known, so") == 1


def test_a_home_that_cannot_be_written_is_none(homeless, monkeypatch, caplog):
    (homeless / "home").write_text("a file, since root may write anywhere")
    monkeypatch.setenv("HOME", str(homeless / "home"))
    assert directories.cache() == homeless / f"jaxformer-{os.getuid()}"
    assert "home/.cache/jaxformer cannot be written" in caplog.text
    (homeless / "good").mkdir()
    monkeypatch.delenv(directories.CACHE_VARIABLE)
    monkeypatch.setenv("HOME", str(homeless / "good"))
    assert directories.cache() == homeless / "good" / ".cache" / "jaxformer"


@pytest.mark.parametrize("taken", ["open", "link", "file"])
def test_a_temporary_folder_that_somebody_prepared_is_not_used(taken, homeless):
    name = homeless / f"jaxformer-{os.getuid()}"
    (homeless / "theirs").mkdir(mode=0o700)
    if taken == "open":
        name.mkdir()
        name.chmod(0o770)
    elif taken == "link":
        name.symlink_to(homeless / "theirs")
    else:
        name.write_text("")
    folder = directories.private_temporary()
    assert folder.parent == homeless and folder != name
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_home_that_nobody_knows_is_one_line():
    with pytest.raises(ConfigError, match="data.dir: got '~nobody-of-that-name/x', whose home is not known"):
        directories.expand_user("~nobody-of-that-name/x", "data.dir")


# --- trust ------------------------------------------------------------------------------------------------------------


def test_a_folder_of_ones_own_is_trusted_and_so_is_one_that_is_not_there_yet(tmp_path):
    (tmp_path / "own").mkdir(mode=0o755)
    assert (
        directories.untrusted_reason(tmp_path / "own")
        == directories.untrusted_reason(tmp_path / "own" / "not" / "yet")
        == ""
    )


@pytest.mark.parametrize("mode", [0o777, 0o702, 0o1777])
def test_a_folder_that_others_can_write_to_is_not(mode, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    assert f"open can be written by others (mode {mode:o})" in directories.untrusted_reason(tmp_path / "open")
    inside = directories.untrusted_reason(tmp_path / "open" / "inside")
    assert inside == "" if mode & stat.S_ISVTX else "open can be written by others" in inside
    (tmp_path / "link").symlink_to(tmp_path / "open")
    assert directories.untrusted_reason(tmp_path / "link"), "what counts is where a link leads"


def test_a_group_counts_unless_the_user_is_alone_in_it(tmp_path, monkeypatch):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o770)
    monkeypatch.setattr(directories, "_is_private", lambda group: False)
    assert "can be written by others (mode 770)" in directories.untrusted_reason(tmp_path / "shared")
    monkeypatch.setattr(directories, "_is_private", lambda group: True)
    assert directories.untrusted_reason(tmp_path / "shared") == ""


def test_a_private_group_is_named_as_its_only_member():
    import grp
    import pwd

    own = pwd.getpwuid(os.geteuid())
    for group in grp.getgrall():
        alone = group.gr_gid == own.pw_gid and group.gr_name == own.pw_name and not set(group.gr_mem) - {own.pw_name}
        assert directories._is_private(group.gr_gid) == alone


@pytest.mark.parametrize("which", ["folder", "above", "entry"])
def test_what_belongs_to_somebody_else_is_not_trusted(which, tmp_path, monkeypatch):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "program").write_text("")
    path = {"folder": "a/b", "above": "a", "entry": "a/b/program"}[which]
    if os.geteuid():
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        path = ""
    else:
        os.chown(tmp_path / path, 12345, -1)
    assert "belongs to user" in directories.untrusted_reason(tmp_path / "a" / "b")
    assert str(tmp_path / path) in directories.untrusted_reason(tmp_path / "a" / "b")
