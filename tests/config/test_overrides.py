"""The config's front: what passes, what is refused, and that every refusal is one line with the full path."""

import dataclasses
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict

from jaxformer.config import (
    AttentionConfig,
    Config,
    ConfigError,
    DataConfig,
    HeadConfig,
    ModelConfig,
    MoEConfig,
    RecurrentConfig,
    StackConfig,
    TaskConfig,
    checks,
    hints,
    overrides,
    schema,
)
from jaxformer.config.checks.fields import check_fields
from jaxformer.config.constraints import MAX_INT32, Folder, OptionsOf, Range
from jaxformer.config.overrides import section


def recipe(**edits) -> ConfigDict:
    """A valid seq2seq config of small parts, with values set at dotted paths ("model__encoder__width")."""
    config = overrides.defaults()
    config.model.encoder = section(StackConfig, layers=2, width=32, attention=dict(heads=4))
    config.model.decoder = section(StackConfig, layers=2, width=32, attention=dict(heads=4))
    for path, value in edits.items():
        node = config
        *parents, name = path.split("__")
        for parent in parents:
            node = node[parent]
        node[name] = value
    return config


def refused(call, *arguments) -> str:
    """The message of the ConfigError that `call` raises: one short line."""
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


# --- defaults, sections, freeze ---------------------------------------------------------------------------------------


def test_defaults_are_the_dataclasses():
    config = overrides.defaults()
    assert config.train.steps == Config().train.steps
    assert config.model.encoder is None
    assert hints.convert(config, Config, "config") == Config()


def test_freeze_gives_the_dataclasses_back():
    frozen = overrides.freeze(recipe(train__steps=7, schedule__peak=1, data__buckets=[16, 32]))
    assert frozen.train.steps == 7
    assert frozen.schedule.peak == 1.0
    assert isinstance(frozen.schedule.peak, float)
    assert frozen.data.buckets == (16, 32)
    assert frozen.model.encoder == StackConfig(layers=2, width=32, attention=AttentionConfig(heads=4))


def test_sections_take_nested_edits():
    part = section(StackConfig, width=64, attention=dict(heads=8, kv_heads=2), ffn=None)
    assert part.attention.to_dict() | {"heads": 8, "kv_heads": 2} == part.attention.to_dict()
    assert part.ffn is None
    part.norm.order = "post"
    config = overrides.defaults()
    config.model.decoder = part
    config.task.name = "language_modelling"
    decoder = overrides.freeze(config).model.decoder
    assert (decoder.width, decoder.attention.kv_heads, decoder.norm.order) == (64, 2, "post")


def test_sections_refuse_unknown_edits():
    assert "attention.heds" in refused(lambda: section(StackConfig, attention=dict(heds=2)))
    assert "'width'" in refused(lambda: section(RecurrentConfig, widht=2))


def test_two_defaults_share_nothing():
    one, two = overrides.defaults(), overrides.defaults()
    one.train.steps, one.data.splits.test = 5, ("x",)
    assert two.train.steps == Config().train.steps
    assert dict(two.data.splits) == {}


WRONG_TYPES = [
    ("train__steps", True, "config.train.steps: got True (bool), expected int"),
    ("train__steps", 1.0, "expected int"),
    ("train__steps", "7", "expected int"),
    ("train__steps", None, "got None, expected int"),
    ("train__ema", "0.9", "expected float or None"),
    ("train__ema", True, "expected float or None"),
    ("schedule__peak", float("nan"), "expected float"),
    ("schedule__peak", float("inf"), "expected float"),
    pytest.param("schedule__peak", 10**400, "expected float", id="large"),
    ("schedule__peak", True, "config.schedule.peak: got True (bool), expected float"),
    ("model__encoder__dropout", False, "config.model.encoder.dropout: got False (bool), expected float"),
    ("data__shuffle", 1, "expected true or false"),
    ("data__source", 3, "config.data.source: got 3 (int), expected str"),
    ("data__buckets", 16, "expected a tuple of int"),
    ("data__buckets", (16, True), "config.data.buckets[1]"),
    ("optimizer__decay_exclude", "bias", "expected a tuple of str"),
    ("data__splits", ("a",), "expected a dict of str to a tuple of str"),
    ("data__splits", {"train": "a"}, "config.data.splits.train: got 'a' (str), expected a tuple of str"),
    ("data__columns", {"text": 1}, "config.data.columns.text"),
    ("data", None, "config.data: got None, expected a section (DataConfig)"),
    ("model", 3, "expected a section (ModelConfig)"),
    ("model__encoder", 3, "config.model.encoder: got 3 (int), expected a section (StackConfig) or None"),
    ("model__encoder__attention", None, "config.model.encoder.attention"),
]


@pytest.mark.parametrize(("path", "value", "expected"), WRONG_TYPES)
def test_wrong_types_are_refused(path, value, expected):
    assert expected in refused(overrides.freeze, recipe(**{path: value}))


UNKNOWN = [
    ("trian", 1, "config.trian: got an unknown key", "'train'"),
    ("train__stpes", 1, "config.train.stpes", "'steps'"),
    ("model__encoder__widht", 8, "config.model.encoder.widht", "'width'"),
    ("model__encoder__attention__haeds", 8, "config.model.encoder.attention.haeds", "'heads'"),
    ("model__label_smoothing", 0.1, "config.model.label_smoothing", "config.task.label_smoothing"),
]


@pytest.mark.parametrize(("path", "value", "where", "near"), UNKNOWN)
def test_unknown_keys_are_refused_with_path_and_nearest_name(path, value, where, near):
    message = refused(overrides.freeze, recipe(**{path: value}))
    assert where in message
    assert near in message


# --- checks -----------------------------------------------------------------------------------------------------------

PAIR = {"model__decoder": None, "task__name": "similarity", "model__head__kind": "pair"}
NONSENSE = [
    ({"model__encoder__width": 30}, "config.model.encoder.width: got 30, expected a multiple of attention.heads (4)"),
    ({"model__encoder__attention__kv_heads": 3}, "kv_heads"),
    ({"model__decoder__attention__output": False, "model__decoder__attention__head_width": 16}, "(4 * 16)"),
    ({"model__encoder": None, "model__decoder": None}, "at least one"),
    ({"model__recurrent_encoder": section(RecurrentConfig)}, "one family"),
    ({"model__decoder": None}, "config.task.name: got 'translation', expected an encoder and a decoder"),
    ({"model__decoder": None, "task__name": "language_modelling"}, "a decoder alone"),
    ({"task__name": "language_modelling"}, "a decoder alone"),
    ({"task__name": "masked_lm"}, "an encoder alone"),
    ({"task__name": "classification", "model__decoder": None}, "config.model.head.kind: got 'tokens'"),
    ({"model__head__kind": "classes"}, "expected tokens for the task translation"),
    (PAIR | {"model__head__kind": "pooled"}, "config.model.head.kind: got 'pooled', expected pair for the task"),
    (PAIR | {"model__head__pooling": "last"}, "first or mean for a transformer encoder"),
    (PAIR | {"task__label_smoothing": 0.1}, "config.task.label_smoothing: got 0.1, expected 0 for the task similarity"),
    (PAIR | {"task__objective": "contrast"}, "expected one of regression, contrastive; did you mean 'contrastive'"),
    (PAIR | {"task__temperature": 0.0}, "config.task.temperature: got 0.0, expected more than 0"),
    ({"data__score_range": (5.0, 0.0)}, "config.data.score_range: got (5.0, 0.0), expected the lowest and the highest"),
    ({"data__score_range": (5.0,)}, "config.data.score_range: got (5.0,), expected the lowest and the highest score"),
    ({"data__packing": "concat"}, "config.data.packing"),
    ({"data__buckets": (32, 16)}, "ascending"),
    ({"data__buckets": (16, 16)}, "ascending"),
    ({"data__buckets": (16, 256)}, "at most data.length (128)"),
    ({"data__tokens": 100}, "at least data.length (128)"),
    ({"model__encoder__encoding__kind": "learned", "model__encoder__encoding__max_length": 64}, "data.length (128)"),
    ({"model__encoder__encoding__kind": "rope", "model__encoder__attention__head_width": 5}, "even rotated width"),
    ({"train__accumulation": 5}, "a divisor of data.batch (32)"),
    ({"train__ema_warmup": True}, "false without config.train.ema"),
    ({"train__accumulation": 3, "data__tokens": 256}, "at most the rows of the longest batch (2)"),
    ({"checkpoint__average": 3}, "at most keep_last (2)"),
    ({"checkpoint__average": 2, "checkpoint__average_of": "best", "checkpoint__keep_last": 9}, "keep_best (1)"),
    ({"decode__hypotheses": 5, "decode__method": "beam"}, "at most decode.beams (4)"),
    ({"decode__hypotheses": 2}, "1 for greedy"),
    ({"data__tokenizer__kind": "file"}, "config.data.tokenizer.path"),
    ({"data__splits": {"train": ()}}, "config.data.splits.train"),
    ({"mesh__data": -1, "mesh__tensor": -1}, "-1 at most once"),
    ({"mesh__tensor": 0}, "sizes of at least 1"),
    ({"model__share_embeddings": True, "data__tokenizer__joint": False}, "a joint vocabulary"),
    ({"model__share_embeddings": True, "model__decoder__embed__width": 16}, "equal widths"),
    ({"model__decoder__embed__width": 64}, "at most the model width (32)"),
    ({"model__decoder__causal": False}, "cannot see what it predicts"),
    ({"model__encoder__norm__order": "sandwich", "model__encoder__norm__kind": "none"}, "norm.order is sandwich"),
    ({"model__encoder__norm__order": "res_post", "model__encoder__norm__kind": "none"}, "norm.order is res_post"),
    ({"model__encoder__attention__norm_over": "heads"}, "norm_over: got 'heads', expected head where attention.norm"),
    ({"model__decoder__moe": section(MoEConfig, top_k=9)}, "moe.top_k: got 9, expected at most the experts (8)"),
    ({"model__decoder__moe": section(MoEConfig, top_k=1)}, "False with top_k 1"),
    ({"model__decoder__moe": section(MoEConfig), "model__decoder__ffn": None}, "None where there is no feed-forward"),
    ({"model__decoder__moe": section(MoEConfig), "mesh__expert": 3}, "got 8, expected a multiple of mesh.expert (3)"),
]


@pytest.mark.parametrize(("edits", "expected"), NONSENSE)
def test_nonsense_is_refused(edits, expected):
    assert expected in refused(overrides.freeze, recipe(**edits))


RECURRENT_NONSENSE = [
    (dict(recurrent_encoder=RecurrentConfig(width=9, bidirectional=True)), "an even width"),
    (dict(recurrent_decoder=RecurrentConfig(bidirectional=True)), "a decoder reads forwards"),
    (dict(recurrent_encoder=RecurrentConfig(attention="dot")), "it is the decoder that attends"),
]


@pytest.mark.parametrize(("parts", "expected"), RECURRENT_NONSENSE)
def test_recurrent_nonsense_is_refused(parts, expected):
    model = ModelConfig(**{"recurrent_encoder": RecurrentConfig(), "recurrent_decoder": RecurrentConfig()} | parts)
    assert expected in refused(checks.check, dataclasses.replace(Config(), model=model))


def test_recurrent_pairs_are_not_packed():
    """Their encoder would read on from one text of a row into the next."""
    model = ModelConfig(recurrent_encoder=RecurrentConfig(), recurrent_decoder=RecurrentConfig())
    for task in ("translation", "summarisation", "text_to_text", "span_corruption"):
        config = Config(model=model, task=TaskConfig(task), data=DataConfig(packing="first_fit"))
        assert "data.packing: got 'first_fit', expected none for a recurrent" in refused(checks.check, config)


def test_attention_needs_something_to_attend_to():
    model = ModelConfig(recurrent_decoder=RecurrentConfig(attention="additive"))
    assert "no encoder" in refused(checks.check, dataclasses.replace(Config(), model=model))


def test_last_pooling_of_pairs_is_not_for_two_directions():
    head = HeadConfig(kind="pair", pooling="last")
    model = ModelConfig(recurrent_encoder=RecurrentConfig(bidirectional=True), head=head)
    config = dataclasses.replace(Config(), model=model, task=TaskConfig("similarity"))
    assert "first or mean for pairs that are read in both directions" in refused(checks.check, config)
    one_way = dataclasses.replace(model, recurrent_encoder=RecurrentConfig())
    checks.check(dataclasses.replace(config, model=one_way))


def test_last_pooling_is_not_for_transformer_encoders():
    head = HeadConfig(kind="classes", pooling="last")
    config = recipe(model__decoder=None, task__name="classification", model__head=schema_of(head))
    assert "pooling" in refused(overrides.freeze, config)


def schema_of(part) -> ConfigDict:
    return ConfigDict(dataclasses.asdict(part))


NAMES = [
    ("model__encoder__encoding__kind", "rop", "'rope'"),
    ("model__encoder__attention__kernel", "densee", "'dense'"),
    ("data__source", "numeral", "'numerals'"),
    ("task__name", "translate", "'translation'"),
    ("optimizer__name", "adamww", "'adamw'"),
    ("schedule__kind", "cosin", "'cosine'"),
    ("model__encoder__ffn__activation", "gelu_tan", "'gelu_tanh'"),
    ("model__encoder__norm__order", "posst", "'post'"),
    ("model__dtype", "float16", "float32, bfloat16"),
    ("checkpoint__mode", "mn", "'min'"),
    ("decode__method", "beem", "'beam'"),
    ("data__packing", "concatt", "'concat'"),
]


@pytest.mark.parametrize(("path", "value", "near"), NAMES)
def test_unknown_names_are_refused_with_the_nearest(path, value, near):
    message = refused(overrides.freeze, recipe(**{path: value}))
    assert message.startswith(f"config.{path.replace('__', '.')}: got '{value}', expected one of ")
    assert near in message


def sections() -> list[type]:
    """Every dataclass of the schema."""
    return [
        kind
        for kind in vars(schema).values()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == schema.__name__
    ]


def constrained():
    """Every field of the schema whose values are limited."""
    for kind in sections():
        for name, hint in hints.field_types(kind).items():
            constraint = hints.constraint_of(hint)
            if constraint is not None and not isinstance(constraint, OptionsOf):
                yield kind, name, constraint


@pytest.mark.parametrize("kind", sections())
def test_defaults_are_allowed(kind):
    check_fields(kind(), "config.part")


def outside(constraint):
    """Values that a constraint refuses."""
    if not isinstance(constraint, Range):
        return ["nothing of this name"]
    low, high, ends = constraint.low, constraint.high, constraint.ends
    values = [low - 1, *([low] if ends[0] == "(" else [])]
    if high is not None:
        values += [high + 1, *([high] if ends[1] == ")" else [])]
    return values


@pytest.mark.parametrize(
    ("kind", "name", "value"), [(kind, name, value) for kind, name, c in constrained() for value in outside(c)]
)
def test_values_that_a_field_does_not_allow_are_refused(kind, name, value):
    with pytest.raises(ConfigError, match=rf"^config\.part\.{name}: got "):
        check_fields(dataclasses.replace(kind(), **{name: value}), "config.part")


def test_constraints_of_every_kind_are_found():
    found = {(kind.__name__, name): constraint for kind, name, constraint in constrained()}
    assert len(found) > 100
    assert found["StackConfig", "unroll"] == Range(1, MAX_INT32)
    assert found["CheckpointConfig", "mode"] == ("min", "max")
    assert isinstance(found["TaskConfig", "name"], Folder)


# --- JSON -------------------------------------------------------------------------------------------------------------


def test_json_round_trip_is_exact_and_stable():
    frozen = overrides.freeze(recipe(data__splits={"test": ("b",), "train": ("a", "c")}, train__ema=0.9))
    text = overrides.to_json(frozen)
    assert overrides.from_json(text) == frozen
    assert overrides.to_json(overrides.from_json(text)) == text
    assert list(json.loads(text)) == sorted(json.loads(text))
    assert json.loads(text)["data"]["splits"] == {"test": ["b"], "train": ["a", "c"]}
    assert '\n  "train": {\n    "accumulation": 1,' in text


def test_json_lacking_a_field_takes_its_default():
    value = json.loads(overrides.to_json(overrides.freeze(recipe())))
    del value["train"]["ema"]
    assert overrides.from_json(json.dumps(value)).train.ema is None


def test_json_of_earlier_versions_is_read_by_the_names_of_now():
    value = json.loads(overrides.to_json(overrides.freeze(recipe())))
    del value["decode"]["stopping"]
    for before, now in ((True, "estimate"), (False, "exact")):
        value["decode"]["early_stop"] = before
        assert overrides.from_json(json.dumps(value)).decode.stopping == now
    for before, now in ((None, ()), (3, (3,)), ([3, 4], (3, 4))):
        value["decode"]["forced_last"] = before
        assert overrides.from_json(json.dumps(value)).decode.forced_last == now
    value["decode"]["forced_last"] = "end"
    assert "forced_last" in refused(overrides.from_json, json.dumps(value))
    del value["decode"]["forced_last"]
    value["decode"]["early_stop"] = "maybe"
    assert "early_stop: got an unknown key" in refused(overrides.from_json, json.dumps(value))


BAD_JSON = ["", "{", "[]", "3", "null", '{"train": {"steps": NaN}}', '{"a": 1, "a": 2}', '{"x": 1}', '{"train": []}']


@pytest.mark.parametrize("text", BAD_JSON)
def test_bad_json_is_refused(text):
    refused(overrides.from_json, text)


def test_deeply_nested_json_is_refused():
    refused(overrides.from_json, "[" * 100_000)


def test_reading_a_workdir(tmp_path):
    assert "no config.json" in refused(overrides.read, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert str(tmp_path) in refused(overrides.read, tmp_path)
    frozen = overrides.freeze(recipe())
    (tmp_path / "config.json").write_text(overrides.to_json(frozen))
    assert overrides.read(tmp_path) == frozen
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    assert "unreadable" in refused(overrides.read, tmp_path)


# --- recipes and the command line -------------------------------------------------------------------------------------

RECIPE = """
from jaxformer.config import overrides
from jaxformer.config import ConfigError, StackConfig
from jaxformer.config.overrides import section

def get_config(variant=""):
    if variant not in ("", "wide"):
        raise ConfigError(f"variant: got {variant!r}, expected wide")
    config = overrides.defaults()
    config.model.encoder = section(StackConfig, width=64 if variant == "wide" else 32)
    config.model.decoder = section(StackConfig, width=64 if variant == "wide" else 32)
    return config
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "toy.py").write_text(RECIPE)
    return str(tmp_path / "toy.py")


def test_parse_reads_values_as_their_fields_are_typed(path):
    config = overrides.parse(
        [
            "--config.train.steps=1_000",
            f"--config={path}:wide",
            "--config.schedule.peak=1e-4",
            "--config.train.ema=0.5",
            "--config.train.ema=None",
            "--config.data.shuffle=FALSE",
            "--config.data.buckets=(16, 32,)",
            "--config.data.splits.test=a.en,b.de",
            "--config.data.splits.train=train[:90%]",
            "--config.data.dir=a=b c",
            "--config.optimizer.decay_exclude=",
            "--config.model.encoder.attention.kv_heads=2",
            "--config.optimizer.clip=2",
            "--config.decode.bad_words=(1, 2), (3,)",
            "--config.decode.suppress=4,5",
            "--config.decode.forced_last=2",
        ]
    )
    assert config.model.encoder.width == 64
    assert config.decode.bad_words == ((1, 2), (3,))
    assert (config.decode.suppress, config.decode.forced_first, config.decode.forced_last) == ((4, 5), None, (2,))
    assert (config.train.steps, config.schedule.peak, config.train.ema) == (1000, 1e-4, None)
    assert (config.data.shuffle, config.data.buckets, config.data.dir) == (False, (16, 32), "a=b c")
    assert config.data.splits == {"test": ("a.en", "b.de"), "train": ("train[:90%]",)}
    assert config.optimizer.decay_exclude == ()
    assert config.model.encoder.attention.kv_heads == 2
    assert config.optimizer.clip == 2.0


def test_an_entry_of_a_dict_is_removed_by_no_value(path):
    edits = ["data.splits.test=a,b", "data.splits.train=c,d", "data.columns.text=x", "data.columns.pair=y"]
    removed = [*edits, "data.splits.test=", "data.columns.pair="]
    config = overrides.parse([f"--config={path}", *(f"--config.{edit}" for edit in removed)])
    assert config.data.splits == {"train": ("c", "d")}
    assert config.data.columns == {"text": "x"}
    # What a run saves is the config without it: the same command resumes it.
    assert overrides.describe_resume_conflicts(config, overrides.from_json(overrides.to_json(config))) == []
    message = refused(
        overrides.parse, [f"--config={path}", *(f"--config.{edit}" for edit in edits), "--config.data.splits.tset="]
    )
    assert message.endswith("expected the name of one to remove (test, train); did you mean 'test'?")


BAD_OVERRIDES = [
    ("--config.train.stpes=3", "did you mean 'steps'?"),
    ("--config.train.batch=3", "did you mean config.data.batch or config.evaluate.batch or config.decode.batch?"),
    ("--config.model.decoder.heads=3", "did you mean config.model.decoder.attention.heads or "),
    ("--config.train.steps=3.0", "config.train.steps: got '3.0', expected int"),
    ("--config.train.steps=", "expected int"),
    ("--config.train.steps=True", "expected int"),
    ("--config.train.steps=None", "expected int"),
    pytest.param("--config.train.steps=" + "9" * 5000, "expected int", id="digits"),
    ("--config.train.steps.more=3", "has no fields"),
    ("--config.train.steps", "expected --config.PATH=VALUE"),
    ("--config.train=3", "sections come from the recipe"),
    ("--config.model.encoder=None", "sections come from the recipe"),
    ("--config.model.recurrent_encoder.width=3", "this recipe has no config.model.recurrent_encoder"),
    ("--config.data.splits=a", "--config.data.splits.KEY=VALUE"),
    ("--config.data.splits.a.b=c", "--config.data.splits.KEY=VALUE"),
    ("--config.data.splits.test=", "config.data.splits.test: got no value and no such entry"),
    ("--config.data.format=tvs", "expected one of '', tsv, tsv_quoted, csv, jsonl, labelled; did you mean 'tsv'?"),
    ("--config.data.format=csv", "config.data.format: got 'csv', expected '' for data.source numerals"),
    ("--config.data.shuffle=1", "expected true or false"),
    ("--config.data.buckets=8,x", "got 'x', expected int"),
    ("--config.schedule.peak=nan", "expected float"),
    ("--config.schedule.peak=inf", "expected float"),
    ("--config.=3", "got an unknown key"),
    ("--config..=3", "got an unknown key"),
    ("--confgi.train.steps=3", "expected --config.PATH=VALUE"),
    ("steps=3", "expected --config.PATH=VALUE"),
    ("--config.train.steps=0", "config.train.steps: got 0, expected at least 1"),
    ("--config.decode.length_penalty=-0.1", "config.decode.length_penalty: got -0.1, expected at least 0"),
    ("--config.model.encoder.dropout=1", "less than 1"),
]


@pytest.mark.parametrize(("argument", "expected"), BAD_OVERRIDES)
def test_bad_overrides_are_refused(path, argument, expected):
    assert expected in refused(overrides.parse, [f"--config={path}", argument])


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(hints.field_paths()), st.text(max_size=20))
def test_any_value_of_any_field_is_taken_or_refused(where, text):
    config = recipe()
    try:
        overrides.override(config, where.removeprefix("config."), text)
        frozen = overrides.freeze(config)
    except ConfigError as error:
        assert "\n" not in str(error)
    else:
        assert overrides.from_json(overrides.to_json(frozen)) == frozen


@settings(max_examples=25, deadline=None)
@given(st.text(alphabet=st.characters(exclude_characters="="), max_size=30), st.text(max_size=10))
def test_any_argument_is_taken_or_refused(where, text):
    try:
        overrides.override(recipe(), where, text)
    except ConfigError as error:
        assert "\n" not in str(error)


BAD_RECIPES = [
    ("x = 1", "got no get_config"),
    ("get_config = 3", "got get_config = 3 (int)"),
    ("def get_config(", ":1: got SyntaxError"),
    ("\n\n1/0", ":3: got ZeroDivisionError"),
    ("import nothing_of_that_name", "ModuleNotFoundError"),
    ("def get_config(variant):\n    return 3", "expected a ConfigDict"),
    ("def get_config(variant):\n    raise KeyError('a\\nb')", ":2: got KeyError"),
    ("def get_config(variant):\n    return unknown_name", ":2: got NameError"),
    ("import sys\nsys.exit(0)", "bad.py:2: got SystemExit: 0"),
    ("def get_config():\n    raise SystemExit", "bad.py:2: got SystemExit"),
    ("class Odd(BaseException): pass\ndef get_config():\n    raise Odd('x')", "bad.py:3: got Odd: x"),
    ("def get_config():\n    return get_config()", "bad.py:2: got RecursionError"),
    ("x = 1\0", "null bytes"),
    (
        "from jaxformer.config import StackConfig\nfrom jaxformer.config.overrides import section\n"
        "def get_config():\n    return section(StackConfig, layer=3)",
        "bad.py:4: StackConfig.layer: got an unknown key",
    ),
]


@pytest.mark.parametrize(("text", "expected"), BAD_RECIPES)
def test_bad_recipes_are_refused_with_their_line(tmp_path, text, expected):
    path = tmp_path / "bad.py"
    path.write_text(text)
    assert expected in refused(overrides.load, str(path))


def test_a_recipe_is_a_file_that_ends(tmp_path):
    (tmp_path / "zero.py").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.py")
    for name in ("zero.py", "pipe.py"):
        assert "got an unreadable file (a device or pipe), expected a Python file" in refused(
            overrides.load, str(tmp_path / name)
        )


def test_ctrl_c_in_a_recipe_is_not_the_recipes_fault(tmp_path):
    (tmp_path / "slow.py").write_text("def get_config():\n    raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        overrides.load(str(tmp_path / "slow.py"))


def test_missing_recipes_and_variants(path, tmp_path):
    assert "no such file" in refused(overrides.load, str(tmp_path / "nothing.py"))
    assert "'toy.py'" in refused(overrides.load, str(tmp_path / "toi.py"))
    assert "unreadable" in refused(overrides.load, str(tmp_path))
    assert "expected wide" in refused(overrides.load, f"{path}:narrow")
    known = 'VARIANTS = ("transformer", "lstm")\nOLD_VARIANTS = {"bilstm": "lstm"}\n'
    (tmp_path / "new.py").write_text(RECIPE.replace('("", "wide")', '("", "transformer", "lstm")') + known)
    message = refused(overrides.load, f"{tmp_path}/new.py:lsmt")
    assert message.endswith("got variant 'lsmt', expected one of transformer, lstm; did you mean 'lstm'?")
    assert overrides.load(f"{tmp_path}/new.py:bilstm") == overrides.load(f"{tmp_path}/new.py:lstm")
    (tmp_path / "dict.py").write_text("def get_config(variant):\n    return {'a': 1}[variant]")
    assert "got variant 'b', expected one that the recipe has" in refused(overrides.load, f"{tmp_path}/dict.py:b")
    (tmp_path / "plain.py").write_text("def get_config():\n    return 1")
    assert "has no variants" in refused(overrides.load, f"{tmp_path}/plain.py:cpu")
    for argv in ([], [f"--config={path}", f"--config={path}"], ["--config="]):
        assert "--config: got" in refused(overrides.parse, argv)


# --- comparing --------------------------------------------------------------------------------------------------------


def test_a_fingerprint_leaves_out_defaults_and_what_decides_no_number():
    config = Config()
    base = overrides.fingerprint(config)
    train = lambda **edits: dataclasses.replace(config, train=dataclasses.replace(config.train, **edits))  # noqa: E731
    assert overrides.fingerprint(train(log_every=7, watchdog=3.0)) == base
    others = [train(steps=7), train(seed=1), train(ema=0.5), dataclasses.replace(config, data=DataConfig(dir="x"))]
    stack = dataclasses.replace(config, model=dataclasses.replace(config.model, encoder=StackConfig()))
    assert len({base, *map(overrides.fingerprint, [*others, stack])}) == 6
    # Kept by name in the folders of sweeps: it may not change from one version to the next.
    assert base == "dbe7649e123d93cd"


def test_differences_are_what_makes_another_run():
    saved = overrides.freeze(recipe())
    mine = overrides.edit(saved, ["--config.train.seed=3", "--config.train.steps=9", "--config.mesh.tensor=2"])
    assert overrides.describe_resume_conflicts(mine, saved) == ["train.seed: here 3, there 0"]
    assert overrides.resume_conflicts(mine, saved) == ["train.seed"]
    assert overrides.resume_conflicts(saved, saved) == []
    assert set(overrides.diff(mine, saved)) == {"train.seed", "train.steps", "mesh.tensor"}


def test_what_a_run_fills_in_does_not_differ():
    config = overrides.freeze(recipe())
    encoder = dataclasses.replace(config.model.encoder, embed=dataclasses.replace(config.model.encoder.embed, vocab=96))
    saved = dataclasses.replace(config, model=dataclasses.replace(config.model, encoder=encoder))
    assert overrides.resume_conflicts(config, saved) == []
    assert overrides.resume_conflicts(saved, config) == ["model.encoder.embed.vocab"]


def test_a_missing_part_differs():
    config = overrides.freeze(recipe())
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, encoder=None))
    assert overrides.describe_resume_conflicts(config, other) == ["model.encoder: here a StackConfig, there None"]
