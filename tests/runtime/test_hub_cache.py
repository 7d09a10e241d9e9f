"""Models by name in the cache that the hub's client keeps, read without the client."""

import os

import pytest

from jaxformer.config import ConfigError
from jaxformer.runtime import hub
from jaxformer.runtime.hub import Download

OLD, NEW = "0123456789" * 4, "abcdef0123" * 4


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache with two commits of org/name: main is the newer; files are links, as the client makes them."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(hub, "_client", lambda: None)
    monkeypatch.chdir(tmp_path)
    storage = tmp_path / "hub" / "models--org--name"
    for commit, text in ((OLD, "old"), (NEW, "new")):
        (storage / "snapshots" / commit / "deep").mkdir(parents=True)
        (storage / "blobs").mkdir(exist_ok=True)
        (storage / "blobs" / text).write_text(text)
        for file in ("a", "b", "deep/a", "deep/b"):
            up = "../" * (3 if "/" in file else 2)
            (storage / "snapshots" / commit / file).symlink_to(f"{up}blobs/{text}")
    for revision, commit in (("main", NEW), ("v1", OLD), ("pr/1", OLD)):
        (storage / "refs" / revision).parent.mkdir(parents=True, exist_ok=True)
        (storage / "refs" / revision).write_text(commit)
    return storage


def needs(*files):
    return lambda names, read_json: list(files)


def test_names_of_the_hub_are_told_from_paths(tmp_path):
    for name in ("org/name", "bert-base-uncased", "a.b_c/d-e", "org/name@v1", "org/name@refs/pr/1"):
        assert hub.is_name(name), name
    wrong = ("/org/name", "./name", "~/name", "a/b/c", "org/", "", ".", "..", "a..b", "a--b/c", "x.git", "a@", "a@../b",
             "org/name@v1@v2", "é/x", "a b", "x" * 97)  # fmt: skip
    for name in wrong:
        assert not hub.is_name(name), name
    (tmp_path / "org" / "here").mkdir(parents=True)
    (tmp_path / "org" / "dangling").symlink_to("absent")
    assert not hub.is_name("org/here") and not hub.is_name("org/dangling")
    assert not hub.is_name(tmp_path.relative_to(tmp_path) / "org" / "name")  # a Path is a path


@pytest.mark.parametrize(
    ("source", "options", "expected"),
    [
        ("org/name", {}, (NEW, "")),
        ("org/name@v1", {}, (OLD, "")),
        ("org/name", {"revision": "pr/1"}, (OLD, "")),
        ("org/name", {"revision": OLD}, (OLD, "")),
        ("org/name@v1", {"revision": "v1", "subfolder": "deep"}, (OLD, "deep")),
    ],
)
def test_a_revision_is_found_by_the_layout(cache, source, options, expected):
    commit, folder = expected
    found = hub.find(source, needs("a", "b"), Download(**options))
    assert found == cache / "snapshots" / commit / folder and (found / "a").is_file()


def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("HF_HOME")
    variables = (
        ("", "", "/home/somebody/.cache/huggingface/hub"),
        ("XDG_CACHE_HOME", "/x", "/x/huggingface/hub"),
        ("HF_HOME", "~/hf", "/home/somebody/hf/hub"),
        ("HUGGINGFACE_HUB_CACHE", "/old", "/old"),
        ("HF_HUB_CACHE", "$HOME/new", "/home/somebody/new"),
    )
    for name, value, expected in variables:  # each wins over those before it
        if name:
            monkeypatch.setenv(name, value)
        assert str(hub.cache_directory()) == expected, name
    assert str(hub.cache_directory("/given")) == "/given"
    elsewhere = tmp_path / "elsewhere"
    os.rename(tmp_path / "hub", elsewhere)
    assert hub.find("org/name", needs("a"), Download(cache_dir=elsewhere)).is_relative_to(elsewhere)


def test_the_two_flags_are_read_as_the_client_reads_them(monkeypatch):
    cases = (
        (None, None, False),
        ("1", None, True),
        ("yes", None, True),
        (None, "ON", True),
        ("0", "1", False),
        ("", "1", True),
    )
    for first, second, expected in cases:
        for name, value in (("HF_HUB_OFFLINE", first), ("TRANSFORMERS_OFFLINE", second)):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        assert hub.is_offline() is expected, (first, second)


def refused(source, needed, *words, **options):
    with pytest.raises(ConfigError) as error:
        hub.find(source, needed, Download(**options), "--source")
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_what_is_not_there_is_said_with_the_way_to_get_it(cache, monkeypatch):
    refused(
        "org/other",
        needs("a"),
        "--source: got 'org/other', expected a local directory or a model in",
        "install jaxformer[hub]",
    )
    refused("org/name@v9", needs("a"), "got 'org/name@v9'")
    refused("org/name", needs("a"), "the hub was not asked", revision="9" * 40, local_files_only=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused("org/name", needs("a", "c"), "got org/name without c, expected the file", "the hub was not asked")
    (cache / "blobs" / "new").unlink()  # as a pruned cache leaves it
    refused("org/name", needs("a"), "got 'org/name'")
    for content in ("../../x", "", "main"):
        (cache / "refs" / "main").write_text(content)
        refused("org/name", needs("a"), "got 'org/name'")
    refused("org/name", needs("a"), "revision: got '../../main'", revision="../../main")
    refused("org/name", needs("a"), "subfolder: got '../x'", subfolder="../x")
    refused("org/name@v1", needs("a"), "and revision 'v2', expected one of them", revision="v2")
