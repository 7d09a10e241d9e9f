"""The example scripts for the Flax classes, and the Python of docs/migration.md, on tiny models and data."""

import importlib.util
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from jaxformer.hf import flax

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("good", "bad", "film", "the", "a", "was", "very", "not", "so", "it")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
VOCAB = {word: i for i, word in enumerate((*SPECIAL, *WORDS))}
BERT = {
    "model_type": "bert", "vocab_size": 14, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 16,
}  # fmt: skip
T5 = {
    "model_type": "t5", "vocab_size": 14, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 3,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "vocab_size": 14, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16,
    "eos_token_id": 3, "bos_token_id": 3,
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    """The scripts' pmap over one device, however many are simulated."""
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    monkeypatch.setattr(jax, "local_devices", lambda: jax.devices()[:1])


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / "flax" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checkpoint(directory, cls, config):
    model = cls(flax.PretrainedConfig(**config), seed=0)
    model.save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel(VOCAB, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(SPECIAL))
    if cls is not flax.FlaxGPT2LMHeadModel:
        single = "[CLS] $A [SEP]" if cls is flax.FlaxBertModel else "$A [SEP]"
        special = [(token, VOCAB[token]) for token in SPECIAL[2:]]
        tokenizer.post_processor = processors.TemplateProcessing(single, single + " $B:1 [SEP]:1", special)
    tokenizer.save(str(directory / "tokenizer.json"))
    return model


def sentences(count):
    rng = np.random.default_rng(0)
    for i in range(count):
        label = ("good", "bad")[i % 2]
        yield " ".join(rng.permutation(["the", "film", "was", *rng.choice(WORDS[5:], 2), label])), label


def write_lines(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return str(path)


def test_the_classification_script_learns(tmp_path):
    checkpoint(tmp_path / "bert", flax.FlaxBertModel, BERT)
    data = write_lines(tmp_path / "train.json", [{"sentence1": s, "label": label} for s, label in sentences(64)])
    result = script("run_flax_glue").main([
        f"--model_name_or_path={tmp_path / 'bert'}", f"--train_file={data}", f"--validation_file={data}",
        f"--output_dir={tmp_path / 'out'}", "--max_seq_length=10", "--learning_rate=0.02", "--num_train_epochs=8",
    ])  # fmt: skip
    assert result["accuracy"] >= 0.95 and np.mean(result["losses"][-8:]) < 0.5 * result["losses"][0]
    again = flax.FlaxAutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert again.config.num_labels == 2
    assert float(np.abs(again.params["classifier"]["kernel"]).max()) > 0.05


def test_the_summarisation_script_learns_and_writes(tmp_path):
    checkpoint(tmp_path / "t5", flax.FlaxT5ForConditionalGeneration, T5)
    data = write_lines(tmp_path / "train.json", [{"text": s, "summary": label} for s, label in sentences(64)])
    result = script("run_summarization_flax").main([
        f"--model_name_or_path={tmp_path / 't5'}", f"--train_file={data}", f"--validation_file={data}",
        f"--output_dir={tmp_path / 'out'}", "--max_source_length=8", "--max_target_length=3", "--num_beams=2",
        "--learning_rate=0.03", "--num_train_epochs=9", "--label_smoothing_factor=0.1",
    ])  # fmt: skip
    assert np.mean(result["losses"][-8:]) < 0.5 * result["losses"][0]
    wanted = [label for _, label in sentences(64)]
    assert np.mean([got.strip() == label for got, label in zip(result["summaries"], wanted, strict=True)]) >= 0.9
    assert (tmp_path / "out" / "generated.txt").read_text().splitlines() == result["summaries"]


def test_the_language_model_script_learns(tmp_path):
    checkpoint(tmp_path / "gpt2", flax.FlaxGPT2LMHeadModel, GPT2)
    (tmp_path / "train.txt").write_text("the film was very good so it was a film " * 60)
    result = script("run_clm_flax").main([
        f"--config_name={tmp_path / 'gpt2'}", f"--train_file={tmp_path / 'train.txt'}",
        f"--validation_file={tmp_path / 'train.txt'}", f"--output_dir={tmp_path / 'out'}", "--block_size=12",
        "--learning_rate=0.02", "--num_train_epochs=8",
    ])  # fmt: skip
    assert result["losses"][0] > 2.3 > 1.5 > result["perplexity"]
    assert flax.FlaxAutoModelForCausalLM.from_pretrained(tmp_path / "out").num_params() > 0


def test_the_python_of_the_migration_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint(tmp_path / "checkpoint", flax.FlaxBertModel, BERT)
    checkpoint(tmp_path / "decoder", flax.FlaxGPT2LMHeadModel, GPT2)
    names = {"ids": np.array([[2, 7, 9, 4]]), "mask": np.array([[1, 1, 1, 1]])}
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S):
        exec(compile(block, "docs/migration.md", "exec"), names)
    assert names["logits"].shape == (1, 3) and names["sequences"].shape == (1, 16)
    assert (tmp_path / "trained" / "flax_model.msgpack").exists()
    np.testing.assert_array_equal(names["outputs"].logits.argmax(-1)[:, 0], names["sequences"][:, 5])


def test_the_page_names_every_class_and_every_missing_family():
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    from jaxformer.hf.flax import names

    for group in names.GROUPS.values():
        shown = {
            "MT5": "mT5",
            "GPTNeo": "GPT-Neo",
            "GPTJ": "GPT-J",
            "GPT2": "GPT-2",
            "Bloom": "BLOOM",
            "MBart": "mBART",
        }
        word = shown.get(group.prefix, group.prefix)
        assert word.lower().replace("xlmroberta", "xlm-roberta").replace("prelayer", "-prelayer") in page.lower(), word
    for missing in set(names.MISSING_FAMILIES.values()):
        assert missing in page
