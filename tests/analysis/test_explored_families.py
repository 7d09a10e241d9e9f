"""What the explorer reads of imported models of each family, in bfloat16 and on a mesh, against the model's own pass.

By default families whose layers differ and a pair of unlike widths; `GOLDENS=all` (`make goldens`) compares all of
them, and more meshes.
"""

import dataclasses
import importlib.util
import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest
import small

import jaxformer
from jaxformer.analysis import attention, sentences
from jaxformer.analysis.layers import Reader
from jaxformer.config import AttentionConfig, ConfigError, MeshConfig, ModelConfig
from jaxformer.hf import families, writing
from jaxformer.hf.arguments import make_batch
from jaxformer.models import build
from jaxformer.parallel import mesh as meshes
from jaxformer.parallel import rules
from jaxformer.types import RelationLogits

ALL = os.environ.get("GOLDENS") == "all"
HF = Path(__file__).resolve().parents[1] / "hf"
CASES = json.loads((HF / "goldens" / "cases.json").read_text(encoding="utf-8"))
FAMILIES = {
    "albert": "albert", "bart": "bart_padded", "bert": "bert_padded", "big_bird": "big_bird",
    "blenderbot": "blenderbot", "blenderbot_small": "blenderbot_small", "bloom": "bloom",
    "deberta": "deberta_both_biases", "deberta_v2": "deberta_v2_both_biases", "deepseek_v2": "deepseek_wide",
    "deepseek_v3": "deepseek_bias", "distilbert": "distilbert",
    "electra": "electra", "encoder_decoder": "pair_bert_gpt2", "gemma": "gemma_gelu", "gemma2": "gemma2",
    "t5gemma": "t5gemma",
    "gemma3": "gemma3", "gpt2": "gpt2_alias",
    "gpt_oss": "gpt_oss",
    "gpt_neo": "gpt_neo_layers", "gpt_neox": "gpt_neox", "gptj": "gptj", "llama": "llama_yarn", "longt5": "longt5",
    "marian": HF / "generation" / "marian", "mbart": "mbart", "ministral": "ministral", "ministral3": "ministral3",
    "mistral": "mistral_classifier",
    "mixtral": "mixtral_padded", "modernbert": "modernbert_biases", "mt5": "mt5", "olmo2": "olmo2_yarn",
    "opt": "opt_350m", "pegasus": HF / "generation" / "pegasus",
    "phi": "phi_norms", "phi3": "phi3", "qwen2": "qwen2_classifier", "qwen3": "qwen3_classifier",
    "qwen3_moe": "qwen3moe_router", "qwen3_next": "qwen3_next_full",
    "roberta": "roberta_both_biases", "roberta_prelayernorm": "prelayernorm", "roformer": "roformer",
    "t5": HF / "generation" / "t5", "xglm": "xglm", "xlm_roberta": "xlm_roberta", "xlnet": "xlnet_untied",
}  # fmt: skip
"""A kept checkpoint of each family: a case of cases.json, or a directory."""
IDS = np.array([[5, 9, 7, 11, 6], [8, 4, 10, 7, 2]])


def load(name, place):
    """The model and its inputs by name."""
    if isinstance(name, Path):
        return jaxformer.from_pretrained(name), {"input_ids": IDS}
    spec = importlib.util.spec_from_file_location("golden_values", HF / "goldens" / "write.py")
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    tensors = {key: module.values(key, tuple(shape)) for key, shape in CASES[name]["tensors"].items()}
    writing.write_checkpoint(place, CASES[name]["config"], tensors)
    inputs = CASES[name]["calls"][0]["inputs"]
    wanted = ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "decoder_attention_mask")
    return jaxformer.from_pretrained(place), {key: np.asarray(inputs[key]) for key in wanted if key in inputs}


def own_pass(module, variables, batch):
    """Logits of the whole model at once, and the intermediates that it sows."""
    read = jax.jit(lambda variables, batch: module.apply(variables, batch, mutable=["intermediates"]))
    logits, found = read(variables, batch)
    return logits.tokens if isinstance(logits, RelationLogits) else logits, found["intermediates"]


def compare(reader, batch, atol):
    """Holds maps, residual streams and logits of the layers one at a time against the model's own pass."""
    logits, sown = own_pass(reader.module, reader.variables, batch)
    for visit in reader.walk(batch, maps=lambda side, layer: True):
        if visit.layer < 0:
            continue
        dense = getattr(reader.config, visit.side).first_layers
        group, layer = ("dense_blocks", visit.layer) if visit.layer < dense else ("blocks", visit.layer - dense)
        blocks = sown[visit.side][group]
        pairs = [(visit.output.x, blocks["output"][0])]
        pairs += [(visit.output.attention, blocks["attention"]["probabilities"][0])]
        pairs += [] if visit.output.cross is None else [(visit.output.cross, blocks["cross"]["probabilities"][0])]
        for found, own in pairs:
            found, own = np.asarray(found, np.float32), np.asarray(own[layer], np.float32)
            np.testing.assert_allclose(found, own, atol=atol * max(1.0, np.abs(own).max()))
    found = np.asarray(reader.logits(visit.output.x, visit.inputs.slots))
    np.testing.assert_allclose(found, logits, atol=atol * max(1.0, np.abs(logits).max()))


def test_every_family_has_a_checkpoint_here():
    files = {path.stem for path in Path(families.__file__).parent.glob("[a-z]*.py")}
    assert files == {*FAMILIES}


@pytest.mark.parametrize("family", FAMILIES if ALL else ["gemma2", "encoder_decoder", "deepseek_v3", "modernbert"])
def test_layers_one_at_a_time_are_the_models_own_pass(family, tmp_path):
    model, inputs = load(FAMILIES[family], tmp_path / "model")
    parts = model.config.model
    sides = {side: dataclasses.replace(stack, unroll=1) for side, stack in parts.stacks.items()}
    module = build.build(dataclasses.replace(parts, **sides))
    if parts.is_seq2seq:
        inputs.setdefault("decoder_input_ids", inputs["input_ids"][:, :4])
    batch = make_batch(model.hf.convention, model.hf.settings, parts, model.hf.head, inputs)
    assert attention.reads_tokens_alone(parts) == (family != "longt5")
    compare(Reader(module, model.inference_variables()), batch, 1e-5)


def test_a_model_in_bfloat16_is_shown_as_it_computes():
    """Its layers round like those of the whole model: what differs is the order of sums within a fused program."""
    model = small.model("language_modelling")
    module = build.build(dataclasses.replace(model.config.model, dtype="bfloat16"))
    (sentence,) = sentences.read(model.predictor, ["a cab"])
    compare(Reader(module, model.inference_variables()), sentence.batch, 0.02)
    half = dataclasses.replace(model, module=module)
    (maps,), (exact,) = half.attention(["a cab"]), model.attention(["a cab"])
    assert maps["decoder"].dtype == np.float32
    assert 1e-6 < np.abs(maps["decoder"] - exact["decoder"]).max() < 0.02  # float32's, up to bfloat16's rounding


MESHES = [{"data": 1, "fsdp": 2, "tensor": 4}]
MESHES += [{"data": 2, "tensor": 2, "stage": 2}, {"data": 2, "context": 4}] if ALL else []


@pytest.mark.parametrize("shape", MESHES, ids=lambda shape: "_".join(f"{axis}{size}" for axis, size in shape.items()))
def test_a_model_on_a_mesh_is_the_one_on_a_device(shape):
    model, mesh = small.model("language_modelling"), meshes.make(MeshConfig(**shape), jax.devices()[:8])
    shardings = rules.shardings(build.shapes(model.module), mesh)["params"]
    params = jax.device_put(model.params, shardings)
    assert any(len(leaf.sharding.device_set) == 8 for leaf in jax.tree.leaves(params))
    sharded = dataclasses.replace(model, params=params)
    with jax.set_mesh(mesh):
        found = [sharded.attention(["a cab"])[0]["decoder"], sharded.lens(["a cab"])[0].probs]
        found += [sharded.patch("a cab", "a cob", part=part).log_probs for part in ("residual", "heads") if ALL]
    own = [model.attention(["a cab"])[0]["decoder"], model.lens(["a cab"])[0].probs]
    own += [model.patch("a cab", "a cob", part=part).log_probs for part in ("residual", "heads") if ALL]
    for one, other in zip(found, own, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_attention_to_summaries_is_refused_in_one_line():
    """LongT5's global attention: its sums of blocks are keys without a token."""
    own = dataclasses.replace(small.STACK, attention=AttentionConfig(heads=2, summary=4))
    with pytest.raises(ConfigError, match="attention: got summaries of blocks .*expected one that attends to") as error:
        attention.check(ModelConfig(encoder=own, decoder=small.STACK))
    assert "\n" not in str(error.value)
