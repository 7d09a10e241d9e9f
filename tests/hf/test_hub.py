"""Models by name: downloads and uploads at a stand-in for the hub, on loopback."""

import functools
import json
import logging
import time

import hub_stand_in
import jax
import numpy as np
import pytest
from flax import serialization
from test_peft import directories

import jaxformer
from jaxformer import cli
from jaxformer.config import ConfigError, DataConfig, TokenizerConfig, overrides
from jaxformer.data.tokenizers import Tokenizers
from jaxformer.hf import flax, push, weights, workdirs
from jaxformer.hf import hub as hf_hub
from jaxformer.hf.origin import HuggingFaceOrigin
from jaxformer.runtime import hub as runtime_hub

constants = pytest.importorskip("huggingface_hub.constants", reason="the hub's client is not installed")

TOKEN = "hf_letmein"


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A GPT-2 and an adapter of it."""
    return directories("gpt2", tmp_path_factory.mktemp("local"))


@pytest.fixture(scope="module")
def server():
    with hub_stand_in.serving(hub_stand_in.Hub()) as address:
        yield address


@pytest.fixture
def hub(local, server, tmp_path, monkeypatch):
    """The stand-in with org/gpt2 in several formats, and an empty cache."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_ENDPOINT", server)
    for name, value in (("HF_HUB_OFFLINE", False), ("HF_TOKEN_PATH", str(tmp_path / "no token"))):
        monkeypatch.setattr(constants, name, value)
    workdirs._located.cache_clear()
    stand_in = hub_stand_in.SERVERS[server].hub = hub_stand_in.Hub()
    others = dict.fromkeys(("README.md", "pytorch_model.bin", "flax_model.msgpack", "tf_model.h5", "merges.txt"), b"x")
    others |= {"vocab.txt": "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n", "generation_config.json": "{}"}
    stand_in.add("org/gpt2", {**contents(local[0]), **others})
    return stand_in


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a.params, b.params)


def refused(call, *words):
    with pytest.raises(ConfigError) as error:
        call()
    assert "\n" not in str(error.value) and TOKEN not in str(error.value)
    for word in words:
        assert word in str(error.value)


@functools.cache
def loaded(directory):
    return jaxformer.from_pretrained(directory)


# --- downloads --------------------------------------------------------------------------------------------------------


def test_the_needed_files_are_downloaded_once(hub, local, tmp_path, monkeypatch):
    model = jaxformer.from_pretrained("org/gpt2")
    same(model, loaded(local[0]))
    assert sorted(hub.downloads()) == ["config.json", "generation_config.json", "model.safetensors", "vocab.txt"]
    jaxformer.from_pretrained("org/gpt2", token=TOKEN)
    assert len(hub.downloads()) == 4
    storage, commit = tmp_path / "home" / "hub" / "models--org--gpt2", hub.repositories["org/gpt2"]["main"][0]
    assert (storage / "refs" / "main").read_text() == commit
    asked = len(hub.requests)
    jaxformer.from_pretrained(f"org/gpt2@{commit}")  # a commit never changes
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    same(jaxformer.from_pretrained("org/gpt2"), model)
    assert len(hub.requests) == asked
    monkeypatch.setattr(runtime_hub, "_client", lambda: None)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE")
    assert hf_hub.locate("org/gpt2") == storage / "snapshots" / commit


def test_a_run_and_its_teacher_are_each_asked_for_once(monkeypatch):
    asked = []
    monkeypatch.setattr(hf_hub, "locate", lambda source, what: asked.append(source) or source)
    workdirs._located.cache_clear()
    for name in ("org/student", "org/teacher", "org/student", "org/teacher"):  # models, then parameters
        assert workdirs._located(name) == name
    workdirs._located.cache_clear()
    assert asked == ["org/student", "org/teacher"]


def test_a_format_with_shards_is_followed(hub):
    index = json.dumps({"weight_map": {"a": "m-1.bin", "b": "m-2.bin", "c": "m-1.bin"}})
    files = {"config.json": "{}", "pytorch_model.bin.index.json": index, "m-1.bin": "1", "m-2.bin": "2", "m-3.bin": "3",
             "flax_model.msgpack": "f", "sub/config.json": "{}", "sub/model.safetensors": "s"}  # fmt: skip
    hub.add("org/shards", files)
    found = hf_hub.locate("org/shards")
    assert sorted(path.name for path in found.iterdir()) == [
        "config.json", "m-1.bin", "m-2.bin", "pytorch_model.bin.index.json",
    ]  # fmt: skip
    found = hf_hub.locate("org/shards", runtime_hub.Download(subfolder="sub"))
    assert found.name == "sub" and (found / "model.safetensors").read_text() == "s"
    found = hf_hub.locate("org/shards", weights=(hf_hub.MSGPACKS, hf_hub.SAFETENSORS))
    assert (found / "flax_model.msgpack").exists()
    hub.add("org/evil", files | {"pytorch_model.bin.index.json": json.dumps({"weight_map": {"a": "../../x.bin"}})})
    refused(lambda: hf_hub.locate("org/evil"), "does not name .bin files beside it")
    hub.add("org/empty", {"config.json": "{}", "tf_model.h5": ""})
    refused(lambda: hf_hub.locate("org/empty"), "none of model.safetensors, pytorch_model.bin, flax_model.msgpack")
    hub.add("org/none", {"model.safetensors": ""})
    refused(lambda: hf_hub.locate("org/none"), "got org/none without config.json")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("tokenizer.json vocab.txt spiece.model", ["tokenizer.json"]),
        ("spiece.model vocab.txt", ["spiece.model"]),
        ("source.spm target.spm vocab.json merges.txt", ["source.spm", "target.spm", "vocab.json"]),
        ("vocab.json merges.txt", ["merges.txt", "vocab.json"]),
        (
            "vocab.txt tokenizer_config.json chat_template.jinja",
            ["vocab.txt", "tokenizer_config.json", "chat_template.jinja"],
        ),
        ("vocab.json", []),
    ],
)
def test_files_of_a_tokenizer_are_those_that_are_read(names, expected):
    names = [*names.split(), "config.json", "model.safetensors"]
    chosen = hf_hub.model_files(names, lambda name: {}, [hf_hub.SAFETENSORS], True)
    assert chosen == ["config.json", *expected, "model.safetensors"]


def test_an_adapter_and_its_base_come_from_the_hub(hub, local, monkeypatch):
    adapter = contents(local[1])
    values = json.loads(adapter["adapter_config.json"]) | {"base_model_name_or_path": "org/gpt2", "revision": "v1"}
    hub.add("org/adapter", adapter | {"adapter_config.json": json.dumps(values), "tokenizer.json": "{}"})
    hub.add("org/gpt2", contents(local[0]), "v1")
    expected = jaxformer.from_pretrained(local[1], base=local[0])
    same(jaxformer.from_pretrained("org/adapter"), expected)
    assert "GET /api/models/org/gpt2/revision/v1" in hub.requests and "tokenizer.json" not in hub.downloads()
    same(jaxformer.from_pretrained(local[1], base="org/gpt2@v1", local_files_only=True), expected)


def test_options_of_downloads_are_refused_for_directories(local):
    refused(lambda: jaxformer.from_pretrained(local[0], revision="v1", token=True), "revision, token: got a value for")
    refused(lambda: jaxformer.from_pretrained(local[1], base=local[0], cache_dir="x"), "cache_dir: got a value for")


def test_refusals_of_the_hub_are_one_line(hub, local, tmp_path, monkeypatch, capsys):
    load = lambda name, **options: lambda: jaxformer.from_pretrained(name, **options)  # noqa: E731
    refused(load("org/none"), "got 'org/none', which is neither here nor a model of http://127.0.0.1")
    refused(load("org/gpt2", revision="v9"), "(revision 'v9'), expected a revision that it has")
    hub.private.add("org/gpt2")
    refused(load("org/gpt2", token="hf_wrong"), "see HF_TOKEN")
    same(jaxformer.from_pretrained("org/gpt2", token=TOKEN), loaded(local[0]))
    hub.private.clear()
    hub.gated.add("org/gpt2")
    refused(load("org/gpt2"), "expected its terms accepted there")
    hub.gated.clear()
    hub.broken = 418
    refused(load("org/gpt2"), "got status 418 from http://127.0.0.1")
    workdir = f"--workdir={tmp_path}/run"
    assert cli.main(["import", "--source=org/gpt2", workdir]) == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0 and "--source: got status 418" in error and not (tmp_path / "run").exists()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    refused(load("org/other"), "got no answer of http://127.0.0.1:1 for org/other")


def test_a_broken_download_leaves_the_last_one(hub, local, caplog, monkeypatch):
    old = hf_hub.locate("org/gpt2")
    hub.add("org/gpt2", contents(local[0]) | {"config.json": "{}", "model.safetensors": b"new"})
    hub.missing = {"model.safetensors"}
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the client's tries
    with caplog.at_level(logging.WARNING):
        assert hf_hub.locate("org/gpt2") == old
    assert "the files of the last download are read" in caplog.text
    assert hf_hub.locate("org/gpt2", runtime_hub.Download(local_files_only=True)) == old
    refused(lambda: hf_hub.locate("org/gpt2", runtime_hub.Download(force_download=True)), "got no answer")
    hub.missing = set()
    assert (hf_hub.locate("org/gpt2") / "model.safetensors").read_bytes() == b"new"


def test_a_run_starts_from_a_name(hub, local):
    config = overrides.edit(
        overrides.freeze({"init": {"directory": "org/gpt2"}, "task": {"name": "language_modelling"}}), []
    )
    model, _ = workdirs.ORIGIN.read_model(config)
    assert model == loaded(local[0]).config.model
    hub.add("org/gpt2", {"config.json": "{}", "model.safetensors": b""})  # a newer one, between the two readings
    assert workdirs.ORIGIN.read_model(config)[0] == model


def test_a_tokenizer_by_name(hub, tmp_path):
    import tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "cat": 4}
    text = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "<unk>")).to_str()
    hub.add("org/words", {"tokenizer.json": text, "model.safetensors": b""})
    build = lambda path: Tokenizers.build(  # noqa: E731
        DataConfig(tokenizer=TokenizerConfig(kind="file", path=path)), [], ["text"]
    )
    assert build("org/words").source.vocabulary.pieces[4] == "cat" and hub.downloads() == ["tokenizer.json"]
    refused(lambda: build("org/gpt2"), "data.tokenizer.path: got org/gpt2 with none of tokenizer.json")


# --- Flax classes -----------------------------------------------------------------------------------------------------


def leaves(tensors):
    """The old tree of a GPT-2's tensors, as a msgpack."""
    tree = {}
    for name, tensor in tensors.items():
        *modules, last = name.split(".")
        array = np.asarray(tensor.array(), np.float32)
        is_norm, is_table = modules[-1].startswith("ln"), modules[-1] in ("wte", "wpe")
        leaf = last if last != "weight" else "scale" if is_norm else "embedding" if is_table else "kernel"
        node = tree
        for module in modules:
            node = node.setdefault(module, {})
        node[leaf] = array.T if leaf == "kernel" else array
    return serialization.msgpack_serialize(tree)


def test_flax_classes_find_names_and_a_tree_is_read_as_tensors(hub, local, tmp_path, caplog):
    config, tensors = (local[0] / "config.json").read_bytes(), weights.open_weights(local[0])
    tree = leaves(tensors)
    hub.add("org/tree", {"config.json": config, "flax_model.msgpack": tree, "model.safetensors": b"x"}, "v2")
    hub.private.add("org/tree")
    arguments = {"revision": "v2", "use_auth_token": TOKEN, "cache_dir": tmp_path / "other", "resume_download": True}
    with caplog.at_level(logging.WARNING):
        model = flax.FlaxAutoModelForCausalLM.from_pretrained("org/tree", **arguments)
    assert "got resume_download, which change nothing" in caplog.text and "revision" not in caplog.text
    assert model.name_or_path == "org/tree" and hub.downloads() == ["config.json", "flax_model.msgpack"]
    assert (tmp_path / "other" / "models--org--tree" / "refs" / "v2").exists()
    kernel = model.params["transformer"]["h"]["0"]["attn"]["c_attn"]["kernel"]
    np.testing.assert_array_equal(kernel.T, tensors["transformer.h.0.attn.c_attn.weight"].array())
    again = flax.FlaxGPT2LMHeadModel.from_pretrained(
        "org/tree", revision="v2", cache_dir=tmp_path / "other", local_files_only=True
    )
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    assert flax.AutoConfig.from_pretrained("org/gpt2").model_type == "gpt2" and hub.downloads()[2:] == ["config.json"]
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "config.json").write_bytes(config)
    (tmp_path / "tree" / "flax_model.msgpack").write_bytes(tree)
    same(jaxformer.from_pretrained(tmp_path / "tree"), loaded(local[0]))
    assert workdirs.is_hf_directory(tmp_path / "tree")
    with pytest.raises(ConfigError, match="two leaves that mean a.weight"):
        weights.of_leaves({("a", "scale"): np.zeros(1), ("a", "weight"): np.zeros(1)}, "file")


# --- uploads ----------------------------------------------------------------------------------------------------------


def test_a_model_is_pushed_with_its_recipe_and_scores(hub, local, tmp_path, monkeypatch):
    (tmp_path / "result.json").write_text(json.dumps({"step": 9, "config": "f00", "loss": 2.5}))
    scores = {"split": "test", "seconds": 3, "bleu": 31.25, "examples": 7, "chrf": float("nan"), "changed": True}
    (tmp_path / "eval-test.json").write_text(json.dumps(scores))
    (tmp_path / "eval-damaged.json").write_text("{")
    model = loaded(local[0])
    origin = model.hf.__class__(**{**model.hf.__dict__, "workdir": tmp_path})
    secret = f"/data/{'ghp_' + 'a' * 30}"
    config = overrides.edit(model.config, [f"--config.data.dir={secret}"])
    model = model.__class__(**{**model.__dict__, "hf": origin, "config": config})
    address = model.push_to_hub("org/mine", token=TOKEN, private=True, revision="dev", message="First")
    assert address.endswith(f"/org/mine/commit/{hub.repositories['org/mine']['dev'][0]}")
    assert hub.messages == ["First"] and "org/mine" in hub.private
    assert set(hub.uploaded["org/mine"]) == {"README.md", "config.json", "model.safetensors"}
    text = hub.uploaded["org/mine"]["README.md"].decode()
    _, head, body = text.split("---\n", 2)
    metadata = dict(line.split(": ", 1) for line in head.strip().splitlines())
    assert metadata["library_name"] == '"jaxformer"' and metadata["pipeline_tag"] == '"text-generation"'
    results = {
        entry["dataset"]["split"]: entry["metrics"] for entry in json.loads(metadata["model-index"])[0]["results"]
    }
    assert results == {"validation": [{"type": "loss", "value": 2.5}], "test": [{"type": "bleu", "value": 31.25}]}
    assert "| test | bleu | 31.25 |" in body and 'from_pretrained("org/mine")' in body
    recipe = overrides.from_json(body.split("```json\n")[1].split("```")[0])
    assert recipe.model == model.config.model and "ghp_" not in text
    same(jaxformer.from_pretrained("org/mine@dev", token=TOKEN), model)
    refused(lambda: model.push_to_hub("org/more", token="hf_wrong"), "push_to_hub: got status 401")
    refused(lambda: model.push_to_hub("a/b/c"), "got 'a/b/c', expected the name of a model")
    assert "Nothing was measured" in push.card(model, HuggingFaceOrigin("causal_lm"), "org/x")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    refused(lambda: workdirs.export_checkpoint(tmp_path, None, push="org/mine"), "HF_HUB_OFFLINE")
    refused(lambda: workdirs.export_checkpoint(tmp_path, None), "--target: got none")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(runtime_hub, "_client", lambda: None)
    refused(lambda: flax.FlaxGPT2LMHeadModel.push_to_hub(None, "org/mine"), "pip install jaxformer[hub]")
