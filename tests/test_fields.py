"""The list of the config's fields is complete, and docs/config.md is what it gives today."""

from pathlib import Path

from jaxformer import fields, schema

ROOT = Path(__file__).resolve().parents[1]


def test_every_field_is_listed_with_what_it_means():
    listed = {
        f"{path}.{field.name}" for section in fields.sections() for path in section.paths for field in section.fields
    }
    assert set(schema.paths()) <= listed
    silent = [
        f"{section.name}.{field.name}" for section in fields.sections() for field in section.fields if not field.meaning
    ]
    assert silent == [], "config.py: a comment beside the field says what it means"


def test_meanings_are_the_comments_of_the_schema():
    found = {section.name: {field.name: field for field in section.fields} for section in fields.sections()}
    assert found["TrainConfig"]["log_every"] == ("log_every", "int", "20", "steps")
    assert found["InitConfig"]["directory"].meaning.endswith(
        "A recipe that names no model gets the directory's, and its tokenizer"
    )
    assert found["OptimizerConfig"]["decay_exclude"].default == "bias,scale,embed"
    assert found["StackConfig"]["moe"].type == "MoEConfig or None"


def test_the_page_is_current():
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert page == fields.page(), "write it again: python -m jaxformer.fields > docs/config.md"
