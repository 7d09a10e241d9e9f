"""Redaction: which names and texts are secret, and that pages, logs and configs hold no secret."""

import dataclasses
import json

import pytest

from jaxformer import report
from jaxformer.config import Config, ConfigError, overrides
from jaxformer.config.hints import field_types
from jaxformer.runtime import secrets
from jaxformer.sweep import planning
from jaxformer.train import loop

SECRET = [
    "GITHUB_PAT", "HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN",
    "MY_KEY", "my-pat", "apikey", "--config.x.token", "PGPASSWORD", "DB_PASSWD", "GOOGLE_APPLICATION_CREDENTIALS",
    "client.secret", "PASSPHRASE", "api_key", "MYSQL_PWD", "--password", "DB_PASS",
    "SLACK_WEBHOOK_URL", "AUTHORIZATION",
]  # fmt: skip
PLAIN = [
    "PWD", "OLDPWD",
    "tokens", "--config.data.tokens", "tokenizer", "pad_token", "mask_token", "eos_token", "pad_token_id", "keys",
    "monkey", "PATH", "spat", "AWS_REGION", "compact", "keep_last", "TOKENIZERS_PARALLELISM", "OLDPATH", "kv_heads",
    "bypass",
]  # fmt: skip


@pytest.mark.parametrize("name", SECRET)
def test_names_that_sound_secret(name):
    assert secrets.SECRET_NAME.search(name)
    assert secrets.redact_command([f"{name}=sesame", "x"], {}) == [f"{name}=***", "x"]
    assert secrets.redact("it was open-sesame", {name: "open-sesame"}) == "it was ***"
    assert secrets.redact_json({name: "sesame"}) == {name: "***"}


@pytest.mark.parametrize("name", PLAIN)
def test_names_that_do_not(name):
    assert not secrets.SECRET_NAME.search(name)
    assert secrets.redact(f"{name}=value, {name}: 1", {name: "value-of-it"}) == f"{name}=value, {name}: 1"


def test_no_field_of_a_config_sounds_secret():
    def walk(value):
        for name in field_types(type(value)):
            assert not secrets.SECRET_NAME.search(name), name
            if dataclasses.is_dataclass(getattr(value, name)):
                walk(getattr(value, name))

    walk(Config())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:pass@host/x and s3://k@b", "https://***@host/x and s3://***@b"),
        ("https://me:p@ss@host/x", "https://***@host/x"),
        ("https://host/a@b and me@host", "https://host/a@b and me@host"),
        ("https://host/x?api_key=abc&n=1", "https://host/x?api_key=***&n=1"),
        ('{"hf_token": "abc", "n": 1}', '{"hf_token": "***", "n": 1}'),
        ("GITHUB_PAT=abc python x", "GITHUB_PAT=*** python x"),
        ("got ghp_" + "a1B2" * 6 + ".", "got ***."),
        ("AKIA" + "ABCD" * 4, "***"),
        ("give --config.data.columns.KEY=VALUE", "give --config.data.columns.KEY=VALUE"),
        ("expected tokens: 4096, pad_token: <pad>", "expected tokens: 4096, pad_token: <pad>"),
    ],
)
def test_running_text(text, shown):
    assert secrets.redact(text, {}) == shown


def test_passwords_in_addresses_of_variables_count_and_short_values_do_not():
    variables = {"HTTPS_PROXY": "http://me:sesame@proxy:80", "X_KEY": "abc"}
    assert secrets.redact("abc: wrong password sesame", variables) == "abc: wrong password ***"


def test_a_secret_within_another_leaves_nothing():
    assert secrets.redact("sesame-open!", {"A_KEY": "sesame", "B_KEY": "sesame-open"}) == "***!"


# --- where ------------------------------------------------------------------------------------------------------------

RECIPE = """
from jaxformer.config import overrides
from jaxformer.config import StackConfig

def get_config():
    config = overrides.defaults()
    config.model.encoder, config.model.decoder = overrides.section(StackConfig), overrides.section(StackConfig)
    return config
"""
WRONG = {"data.dir": "https://me:sesame@host/data", "data.name": "hf_" + "a1B2" * 6}


@pytest.mark.parametrize(("path", "value"), WRONG.items(), ids=WRONG)
def test_a_config_with_a_password_is_refused_before_anything_is_written(path, value, tmp_path):
    (tmp_path / "toy.py").write_text(RECIPE)
    with pytest.raises(ConfigError, match=f"config.{path}: got .*config.json would keep it") as error:
        overrides.parse([f"--config={tmp_path}/toy.py", f"--config.{path}={value}"])
    assert value not in str(error.value) and "sesame" not in str(error.value)
    config = overrides.load(f"{tmp_path}/toy.py")
    overrides.override(config, path, value)
    with pytest.raises(ConfigError, match="config.json would keep it"):
        loop.train(overrides.freeze(config), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_config_with_what_a_secret_variable_holds_is_refused(tmp_path, monkeypatch):
    (tmp_path / "toy.py").write_text(RECIPE)
    given = [f"--config={tmp_path}/toy.py", "--config.data.dir=/data/open-sesame/x"]
    overrides.parse(given)
    monkeypatch.setenv("GITHUB_PAT", "open-sesame")
    with pytest.raises(ConfigError, match="which holds what the variable GITHUB_PAT holds") as error:
        overrides.parse(given)
    assert "sesame" not in str(error.value)


def test_a_sweep_names_a_refused_run_without_its_secret(tmp_path):
    (tmp_path / "toy.py").write_text(RECIPE)
    (tmp_path / "sweep.py").write_text('SWEEP = [{"data.dir": "https://me:open-sesame@host/"}]')
    with pytest.raises(ConfigError, match="run data.dir=https://...@host/: config.data.dir: got") as error:
        planning.make_plan(f"{tmp_path}/sweep.py", [f"--config={tmp_path}/toy.py"], tmp_path / "runs")
    assert "sesame" not in str(error.value)


def test_a_page_of_a_run_that_has_secrets_shows_none(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "open-sesame")
    tmp_path = tmp_path / "run-open-sesame"
    tmp_path.mkdir()
    config = json.loads(overrides.to_json(Config()))
    config["data"]["dir"] = "https://me:sesame@host/data"
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "environment.json").write_text(json.dumps({"command": ["--note=open-sesame"], "api_key": "sesame"}))
    (tmp_path / "result.json").write_text('{"step": open-sesame')
    (tmp_path / "samples").mkdir()
    samples = [{"input": "open-sesame", "output": "o", "reference": "r"}]
    (tmp_path / "samples" / "test.json").write_text(json.dumps(samples))
    page = report.write([tmp_path]).read_text()
    assert "https://***@host/data" in page
    assert "sesame" not in page
