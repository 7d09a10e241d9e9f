"""Models by the names that the Hugging Face hub gives them: "org/name", or "org/name@revision".

They are found in the cache that the hub's client keeps (https://huggingface.co/docs/huggingface_hub/guides/manage-cache),
read by its layout; the client need not be installed:

    CACHE/models--org--name/refs/REVISION         the commit of a branch or tag
    CACHE/models--org--name/snapshots/COMMIT/     the files of a commit, mostly links to blobs/

CACHE is `HF_HUB_CACHE`, else `HF_HOME/hub`, else `~/.cache/huggingface/hub`. With the client (`huggingface_hub`, extra
[hub]) the files that a reader needs are downloaded into the same cache, from `HF_ENDPOINT`. With `HF_HUB_OFFLINE` or
`TRANSFORMERS_OFFLINE` nothing is asked of the hub.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxformer.errors import ConfigError
from jaxformer.runtime import files, secrets

log = logging.getLogger("jaxformer")

NAME = re.compile(r"(?:\b[\w.-]+\b/)?\b[\w.-]{1,96}\b", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
REVISION = re.compile(r"[\w.+-]+(?:/[\w.+-]+)*", re.ASCII)
DEFAULT_REVISION = "main"
MAX_NAME = 96
"""Characters of a name, as the hub counts."""
TIMEOUT_SECONDS = 10.0
"""Seconds that the hub may take to describe a model, unless `HF_HUB_ETAG_TIMEOUT` says otherwise."""

ReadJson = Callable[[str], dict[str, Any]]
"""Content of a small JSON file of the model, by its name."""
Needed = Callable[[Collection[str], ReadJson], list[str]]
"""The files to read of a model, given the names of all of its files; ConfigError if what it needs is not there."""


@dataclass(frozen=True)
class Download:
    """Options of finding a model of the hub.

    Attributes:
      revision: branch, tag or commit; None: the main branch.
      token: a token of the hub; None: `HF_TOKEN`, or that of a login; False: none.
      cache_dir: the cache; None: as the environment says.
      local_files_only: reads the cache alone.
      force_download: downloads again what is in the cache.
      subfolder: folder of the model's files below the top.
    """

    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | os.PathLike[str] | None = None
    local_files_only: bool = False
    force_download: bool = False
    subfolder: str = ""

    def wishes(self) -> list[str]:
        """Names of the options that differ from their defaults."""
        plain = {"revision": DEFAULT_REVISION, "cache_dir": ""}
        options = ("revision", "token", "cache_dir", "local_files_only", "force_download")
        return [name for name in options if getattr(self, name) not in (None, False, plain.get(name))]


DEFAULT_DOWNLOAD = Download()


def is_name(source: str | os.PathLike[str]) -> bool:
    """True if `source` can be the name of a model on the hub and is not the path of something here.

    A `pathlib.Path` is always a path.
    """
    if not isinstance(source, str) or os.path.lexists(source):
        return False
    name, _, revision = source.partition("@")
    return _is_valid_name(name) and ("@" not in source or _is_valid_revision(revision))


def find(source: str, needed: Needed, options: Download = DEFAULT_DOWNLOAD, what: str = "checkpoint") -> Path:
    """The directory in the cache that holds the needed files of a model, downloaded if they are not there.

    Args:
      source: "org/name", or "org/name@revision".
      needed: chooses the files.
      what: the argument or flag that holds `source`, for errors.

    Raises:
      ConfigError: the model is not in the cache and cannot be downloaded; or it lacks files.
    """
    name, _, revision = source.partition("@")
    if revision and options.revision not in (None, revision):
        raise ConfigError(f"{what}: got {source!a} and revision {options.revision!a}, expected one of them")
    request = _Request(name, revision or options.revision or DEFAULT_REVISION, needed, options, what)
    client = None if options.local_files_only or is_offline() else _client()
    if client is None:
        return _require_cached(request, bool(options.local_files_only or is_offline()))
    if COMMIT.fullmatch(request.revision) and not options.force_download:
        cached = _cached(request)
        if cached is not None:  # a commit never changes
            return cached
    return _download(client, request)


def is_offline() -> bool:
    """True if the environment forbids to ask the hub, as its client reads the two variables."""
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def cache_directory(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """The cache of the hub's client: `cache_dir`, or as the environment says."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    variables = os.environ
    home = variables.get("HF_HOME") or os.path.join(variables.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = variables.get("HF_HUB_CACHE") or variables.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    return Path(os.path.expandvars(os.path.expanduser(cache)))


def check_upload(name: str, revision: str | None = None) -> None:
    """Checks what can be known before a model is written.

    Raises:
      ConfigError: the name or the revision is none, the environment forbids to ask the hub, or the client is missing.
    """
    if not _is_valid_name(name):
        raise ConfigError(f"push_to_hub: got {name!a}, expected the name of a model, as org/name")
    if revision is not None and not _is_valid_revision(revision):
        raise ConfigError(f"push_to_hub: got revision {revision!a}, expected the name of a branch")
    if is_offline():
        raise ConfigError(f"push_to_hub: got {name!a} with HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE, expected neither")
    if _client() is None:
        raise ConfigError("push_to_hub: got no package huggingface_hub, expected it; pip install jaxformer[hub]")


def upload(
    directory: Path, name: str, *, token: str | bool | None, revision: str | None, private: bool | None, message: str
) -> str:
    """Uploads a directory as a model of the hub, which is made if there is none; returns the address of the commit.

    Raises:
      ConfigError: see `check_upload`; or the hub refuses, or does not answer.
    """
    check_upload(name, revision)
    client = _client()
    try:
        with _errors(client, "push_to_hub", name, revision):
            api = _api(client, token)
            name = api.create_repo(name, private=private, exist_ok=True).repo_id  # "name" alone becomes "user/name"
            if revision not in (None, DEFAULT_REVISION):
                api.create_branch(name, branch=revision, exist_ok=True)
            commit = api.upload_folder(repo_id=name, folder_path=directory, revision=revision, commit_message=message)
            return str(commit.commit_url)
    except _Unreachable as error:
        raise ConfigError(str(error)) from None


# --- the cache --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Request:
    """A model to find: its name, its revision, the choice of its files, and the option that names it."""

    name: str
    revision: str
    needed: Needed
    options: Download
    what: str

    def __post_init__(self) -> None:
        if not _is_valid_revision(self.revision):
            raise ConfigError(f"revision: got {self.revision!a}, expected a branch, a tag or a commit of {self.name}")
        if self.options.subfolder and ".." in Path(self.options.subfolder).parts:
            raise ConfigError(f"subfolder: got {self.options.subfolder!a}, expected a folder inside of {self.name}")

    @property
    def text(self) -> str:
        """The model as users name it."""
        return self.name if self.revision == DEFAULT_REVISION else f"{self.name}@{self.revision}"

    @property
    def storage(self) -> Path:
        """The model's folder in the cache."""
        return cache_directory(self.options.cache_dir) / f"models--{self.name.replace('/', '--')}"

    @property
    def reference(self) -> Path:
        """The file that holds the commit of the revision."""
        return self.storage / "refs" / self.revision

    def directory(self, commit: str) -> Path:
        """The folder of the files of a commit."""
        return self.storage / "snapshots" / commit / self.options.subfolder

    def choose(self, names: Collection[str], read_json: ReadJson) -> list[str]:
        """The needed files; a ConfigError names the model."""
        try:
            return self.needed(names, read_json)
        except ConfigError as error:
            raise ConfigError(f"{self.what}: got {self.text} with {error}") from None


def _require_cached(request: _Request, offline: bool) -> Path:
    """The directory of the model in the cache; an error says how to get it."""
    problem: ConfigError | None = None
    try:
        found = _cached(request, strict=True)
        if found is not None:
            return found
    except ConfigError as error:
        problem = error
    reason = (
        "the hub was not asked (local_files_only, HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE)"
        if offline
        else "pip install jaxformer[hub] to download it"
    )
    cache = cache_directory(request.options.cache_dir)
    if problem is not None:
        raise ConfigError(f"{problem} in {cache}; {reason}") from None
    raise ConfigError(
        f"{request.what}: got {request.text!a}, expected a local directory or a model in {cache}; {reason}"
    )


def _cached(request: _Request, strict: bool = False) -> Path | None:
    """The directory of a revision in the cache, if all needed files are there.

    Args:
      strict: raise a ConfigError if the revision is there and lacks files.
    """
    commit = request.revision
    if not COMMIT.fullmatch(commit):
        try:
            commit = request.reference.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
        if not COMMIT.fullmatch(commit):
            return None
    directory = request.directory(commit)
    names = [file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file()]
    if not names:
        return None
    try:
        chosen = request.choose(names, lambda name: files.read_json(directory / name))
        missing = [name for name in chosen if name not in names]
        if missing:
            raise ConfigError(f"{request.what}: got {request.text} without {', '.join(missing)}, expected the file")
    except ConfigError:
        if strict:
            raise
        return None
    return directory


# --- downloads --------------------------------------------------------------------------------------------------------


def _client() -> Any:
    """The package `huggingface_hub`, imported when it is first needed; None if it is not installed."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError:
        return None
    return huggingface_hub


def _api(client: Any, token: str | bool | None) -> Any:
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
    return client.HfApi(endpoint=endpoint, token=token, library_name="jaxformer")


def _download(client: Any, request: _Request) -> Path:
    """The directory of the model, after the files that it lacks were downloaded.

    The reference of the revision is written last: it names a commit whose files are there. If the hub cannot be
    reached, the files of the last download are taken, with a warning.
    """
    options = request.options
    try:
        with _errors(client, request.what, request.text, request.revision):
            api = _api(client, options.token)
            seconds = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or TIMEOUT_SECONDS)
            info = api.model_info(request.name, revision=request.revision, timeout=seconds)
            if not COMMIT.fullmatch(info.sha or ""):
                raise ConfigError(f"{request.what}: got commit {info.sha!a} of {request.text}, expected 40 hex digits")
            folder = f"{options.subfolder.strip('/')}/" if options.subfolder.strip("/") else ""

            @functools.cache  # an index is read before its shards are known
            def fetch(name: str) -> Path:
                return Path(
                    api.hf_hub_download(
                        request.name,
                        folder + name,
                        revision=info.sha,
                        cache_dir=str(cache_directory(options.cache_dir)),
                        force_download=options.force_download,
                    )
                )

            present = [file.rfilename for file in info.siblings or [] if file.rfilename.startswith(folder)]
            names = [name.removeprefix(folder) for name in present]
            for name in request.choose(names, lambda name: files.read_json(fetch(name))):
                if name not in names:
                    raise ConfigError(f"{request.what}: got {request.text} without {name}, expected the file")
                fetch(name)
    except _Unreachable as error:
        cached = None if options.force_download else _cached(request)
        if cached is None:
            raise ConfigError(str(error)) from None
        log.warning("%s; the files of the last download are read", error)
        return cached
    if request.revision != info.sha:
        try:
            request.reference.parent.mkdir(parents=True, exist_ok=True)
            files.write_atomic(request.reference, info.sha)
        except OSError as error:  # a cache that others fill
            log.info("%s: %s", request.reference, error.strerror or error)
    return request.directory(info.sha)


class _Unreachable(Exception):
    """The hub does not answer, or answers that it is not itself; the message is one line."""


@contextmanager
def _errors(client: Any, what: str, name: str, revision: str | None) -> Generator[None]:
    """Turns the client's errors into a ConfigError of one line, without tokens.

    Raises:
      _Unreachable: no connection, or an error of the server's own.
    """
    hub = os.environ.get("HF_ENDPOINT") or client.constants.ENDPOINT
    errors = client.errors
    try:
        yield
    except (ConfigError, _Unreachable):
        raise
    except errors.GatedRepoError:
        got, expected = f"{name}, which {hub} gives to some users alone", "its terms accepted there, and your token"
        raise ConfigError(f"{what}: got {got}, expected {expected}; set HF_TOKEN") from None
    except errors.RepositoryNotFoundError:
        got = f"{name!a}, which is neither here nor a model of {hub} that your token may see"
        raise ConfigError(f"{what}: got {got}, expected a local directory or such a model; see HF_TOKEN") from None
    except errors.RevisionNotFoundError:
        got = f"{name} (revision {revision!a})"
        raise ConfigError(f"{what}: got {got}, expected a revision that it has at {hub}") from None
    except Exception as error:  # of the client, and of the packages below it, which differ between its versions
        status = getattr(getattr(error, "response", None), "status_code", None)
        first = next((line for line in str(error).splitlines() if line.strip()), "").strip()
        text = secrets.redact(f"{type(error).__name__}: {first}")[:300]
        if isinstance(error, errors.HfHubHTTPError) and status is not None and status < 500:
            raise ConfigError(f"{what}: got status {status} from {hub} for {name} ({text}), expected success") from None
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
            raise  # of the disk
        raise _Unreachable(f"{what}: got no answer of {hub} for {name} ({text}), expected one; try again") from None


# --- names ------------------------------------------------------------------------------------------------------------


def _is_valid_name(name: str) -> bool:
    plain = bool(NAME.fullmatch(name)) and len(name) <= MAX_NAME
    return plain and "--" not in name and ".." not in name and not name.endswith(".git")


def _is_valid_revision(revision: str) -> bool:
    """True for a branch, tag or commit; never for a path that leaves the folder of references."""
    return bool(REVISION.fullmatch(revision)) and not any(part in (".", "..") for part in revision.split("/"))
